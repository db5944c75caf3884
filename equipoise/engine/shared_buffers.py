"""Whether a run averages the model's buffers (BatchNorm statistics), and what that adds to states and messages."""

from dataclasses import replace

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import Start
from equipoise.algorithms.schema import MessageSchema, infer_schema
from equipoise.errors import EquipoiseError
from equipoise.state import State
from equipoise.training.buffers import BUFFERS
from equipoise.training.task import Task


def averages_buffers(task: Task, algorithm: Algorithm, server: State, private: bool) -> bool:
    """Tell whether the model's buffers (BatchNorm statistics) are averaged like its parameters.

    By default they are if there is a global model, which they are part of. Under privacy they stay with the clients:
    noise could make a variance negative.

    Args:
        task: the task, with the model.
        algorithm: the algorithm.
        server: the server's initial state.
        private: whether uploads are private.
    """
    if private and algorithm.buffers == "average":
        raise EquipoiseError(
            "algorithm.buffers = 'average' is not possible with [privacy], because noise could make the variances of "
            "BatchNorm negative; use 'local', with which they never leave the client, or a model with GroupNorm"
        )
    if not task.buffer_layout.any_averaged or private:
        return False
    return algorithm.global_model(server) is not None if algorithm.buffers is None else algorithm.buffers == "average"


def initial_server(task: Task, algorithm: Algorithm, start: Start, private: bool) -> State:
    """Return the server's state before the first round, with the averaged buffers if there are any.

    Args:
        task: the task, with the model.
        algorithm: the algorithm.
        start: what is known before the first round.
        private: whether uploads are private.
    """
    server = algorithm.init_server(start)
    if not averages_buffers(task, algorithm, server, private):
        return server
    return State(server, **{BUFFERS: task.buffer_layout.shared(task.buffers)})


def message_schema(task: Task, algorithm: Algorithm, start: Start, private: bool) -> MessageSchema:
    """Return the shapes of all states and messages of a run; the arguments are those of `initial_server`."""
    server = initial_server(task, algorithm, start, private)
    schema = infer_schema(algorithm, start, weighted=not private)
    for what in (schema.server, schema.client, schema.down, schema.up):
        if BUFFERS in what:
            raise EquipoiseError(
                f"{type(algorithm).__name__} has a field named {BUFFERS!r}, which is the name of BatchNorm statistics; "
                "give it another name"
            )
    if BUFFERS not in server:
        return schema
    shared = State({BUFFERS: server[BUFFERS]}).shapes()
    return replace(schema, server=schema.server | shared, down=schema.down | shared, up=schema.up | shared)
