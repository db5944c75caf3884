"""The reducer in a run: what it knows of a round, and what it remembers from one round to the next."""

from collections.abc import Callable

from torch import Tensor

from equipoise.algorithms.base import Algorithm, origin_of
from equipoise.algorithms.local_data import Start
from equipoise.errors import EquipoiseError
from equipoise.reducers import Reducer
from equipoise.reducers.context import ReductionContext
from equipoise.state import State, Uploads
from equipoise.training.buffers import BUFFERS, without_buffers

_MEMORY = "reducer."


def message_origin(algorithm: Algorithm, server: State, like: State) -> State | None:
    """Return the origin of messages as they are sent, with averaged buffers if there are any.

    Args:
        algorithm: the algorithm.
        server: the server's state before the round.
        like: a message.
    """
    found = origin_of(algorithm, without_buffers(server), without_buffers(like))
    return found if found is None or BUFFERS not in like else State(found, **{BUFFERS: server[BUFFERS]})


def shared_models(algorithm: Algorithm, server: State, origin: State | None) -> tuple[str, ...]:
    """Return the fields of messages that are models of the kind that all clients share.

    Args:
        algorithm: the algorithm.
        server: the server's state before the round.
        origin: the origin of messages.
    """
    shared = algorithm.global_model(without_buffers(server))
    return tuple(name for name, t in (origin or {}).items() if t is shared)


class Reduction:
    """A run's reducer with its memory."""

    def __init__(
        self, reducer: Reducer, algorithm: Algorithm, start: Start, rounds: int, name_of: Callable[[int], str]
    ):
        """Create the reduction of a run.

        Args:
            reducer: the rule.
            algorithm: the algorithm whose messages are combined.
            start: what is known before the first round.
            rounds: number of rounds of the run.
            name_of: returns the name of the client with a number.
        """
        self.reducer, self.algorithm, self.start = reducer, algorithm, start
        self.rounds, self.name_of = rounds, name_of
        self.memory: State | None = None
        "what the rule remembers; None before its first round"

    def of_round(self, round: int, server: State) -> Callable[[Uploads], State]:
        """Return what combines the messages of a round.

        Args:
            round: the number of the round.
            server: the server's state before it.
        """
        reducer, called = self.reducer, False

        def reduce(uploads: Uploads) -> State:
            nonlocal called
            if called and reducer.remembers:
                raise EquipoiseError(several_groups(reducer, type(self.algorithm).__name__))
            called = True
            if reducer.remembers and self.memory is None:
                self.memory = reducer.memory(uploads.like, self.start.clients)
            origin = message_origin(self.algorithm, server, uploads.like)
            context = ReductionContext(
                origin,
                self.memory or State(),
                round,
                self.rounds,
                self.start.seed,
                self.name_of,
                type(self.algorithm).__name__,
                self.start.space,
                shared_models(self.algorithm, server, origin),
            )
            message, memory = reducer.apply(uploads, context)
            if reducer.remembers:
                self.memory = memory
            return message

        return reduce

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        return {_MEMORY + name: t for name, t in (self.memory or {}).items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore what a checkpoint saved."""
        device = self.start.w0.device
        found = {k.removeprefix(_MEMORY): t.to(device) for k, t in tensors.items() if k.startswith(_MEMORY)}
        self.memory = State(found) if found else None


def several_groups(reducer: Reducer, algorithm: str) -> str:
    """Return why a reducer cannot be used with an algorithm that reduces several groups of messages."""
    return (
        f"reducer {type(reducer).__name__} remembers the round before, and {algorithm} reduces several groups of "
        "messages in a round; use a reducer without memory, such as 'median'"
    )
