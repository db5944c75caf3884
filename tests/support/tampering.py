"""A method that shows whether server and clients agree, and answers that were changed on their way."""

from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.algorithms.schema import infer_schema
from equipoise.flower.client_state import ClientStateFile
from equipoise.flower.protocol import Answer, content, open_message
from equipoise.flower.server import Deployment
from equipoise.state import State, Upload, Uploads
from tests.support.flower_memory import MemoryGrid, deployed
from tests.support.problems import classification, small_mlp

DITTO = {"name": "ditto", "lr": 0.05, "batch": 4}


class Remember(Algorithm):
    """The server's s is the sum of what all clients hold: true only while both sides agree on what was accepted."""

    def init_server(self, start: Start) -> State:
        return State(w=start.w0, s=torch.zeros_like(start.w0))

    def init_client(self, start: Start) -> State:
        return State(m=torch.zeros_like(start.w0))

    def broadcast(self, server: State, client: int) -> State:
        return State(w=server.w)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        m = data.descend(down.w) - down.w + 0.5 * client.m
        return State(m=m), Upload(State(d=m - client.m))

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        s = server.s + uploads.columns("d", 0, 10**9).sum(0)
        return State(w=server.w + 0.1 * s, s=s)

    def global_model(self, server: State) -> Tensor:
        return server.w


def problem(folder: Path, clients: int = 4, algorithm: dict[str, Any] | None = None, **tables: Any) -> Any:
    names = [f"c{i}" for i in range(clients)]
    return deployed(folder, classification(clients, names=names), small_mlp(), algorithm or DITTO, **tables)


def kept(app: Any, grid: MemoryGrid, deployment: Deployment, name: str) -> Any:
    """What is on that client's disk, settled with what the server last took from it."""
    node = next(n for n in grid.nodes.values() if n.settings["name"] == name)
    state = ClientStateFile(Path(node.settings["state"]), deployment.id, name).read()
    return state.settled(deployment.roster.members[name].accepted)


def agrees(app: Any, grid: MemoryGrid, deployment: Deployment) -> None:
    """Remember's server holds exactly the sum of the clients' states."""
    total = torch.zeros_like(deployment.server.s)
    for name, member in deployment.roster.members.items():
        if member.accepted:
            total += kept(app, grid, deployment, name).state.m
    torch.testing.assert_close(deployment.server.s, total, rtol=1e-12, atol=1e-12)


def changed(reply: Message, **facts: Any) -> Message:
    """The same answer with other facts or, under `tensors`, other tensors."""
    tensors = facts.pop("tensors", None)
    shapes = SHAPES["now"]
    answer, given = open_message(reply, Answer, shapes)
    new = answer.model_copy(update=facts)
    return Message(content(new, tensors(given) if tensors else dict(given)), reply_to=order_of(reply))


SHAPES: dict[str, Any] = {}
ORDERS: dict[int, Message] = {}


def order_of(reply: Message) -> Message:
    return ORDERS[id(reply)]


def raw(reply: Message, blob: Any) -> Message:
    return Message(RecordDict({"equipoise": ConfigRecord({"message": blob})}), reply_to=order_of(reply))


def announced(app: Any) -> Any:
    task = app.plan.task()
    return infer_schema(app.plan.experiment.algorithm, task.start(1))
