"""How the clients of a round are worked on: what both ways of execution offer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import HasConsensusModel, PredictsFromSamples
from equipoise.algorithms.local_data import ClientSamples
from equipoise.data.federation import Federation
from equipoise.equilibrium import Solves
from equipoise.state import State, Upload, stack
from equipoise.training.task import Task

BUFFERS = "buffers"
"""The name under which a client's own buffers (BatchNorm statistics) are kept with its state."""
FIXED_POINTS = "fixed_points."
"""How the names begin under which its samples' fixed points are kept with its state, where the model asks for it."""
SENT = "sent."
"""How the names begin under which its last message is kept with its state, where the algorithm asks for it."""
RELEASED = "released."
"""How the names begin under which a real client keeps its last message as the server has it, if privacy asks for it."""
_KEPT = (FIXED_POINTS, SENT, RELEASED)


def algorithm_state(state: State) -> State:
    """A client's state as its algorithm knows it."""
    if not any(k == BUFFERS or k.startswith(_KEPT) for k in state):
        return state
    return State({k: t for k, t in state.items() if k != BUFFERS and not k.startswith(_KEPT)})


def with_engine_state(state: State, task: Task, samples: int, buffers: Tensor | None = None) -> State:
    """An initial state with what the engine keeps beside it, for a client with up to this many training samples."""
    kept = {FIXED_POINTS + name: t for name, t in task.fixed_points(samples).items()}
    if len(task.buffers):
        kept[BUFFERS] = task.buffers if buffers is None else buffers
    return State(state, **kept)


@dataclass(frozen=True)
class StackRow:
    """A client's state in a stack of them, which is taken out of it when it is asked for."""

    stack: State
    index: int


HeldState = State | StackRow


def as_state(held: HeldState) -> State:
    return held.stack.row(held.index) if isinstance(held, StackRow) else held


def stack_states(held: Sequence[HeldState]) -> State:
    """Clients' states as their algorithm knows them, in one stack; all rows of one in their order are that one."""
    first = held[0]
    whole = first.stack if isinstance(first, StackRow) else None
    if whole is not None and len(next(iter(whole.values()), ())) == len(held):
        in_order = (isinstance(h, StackRow) and h.stack is whole and h.index == k for k, h in enumerate(held))
        if all(in_order):
            return whole
    return stack([algorithm_state(as_state(h)) for h in held])


@dataclass(frozen=True)
class ClientJob:
    """A client to work on, with its state and what the server sent it."""

    who: int
    held: HeldState
    down: State
    budget: int | None = None
    "most iterations of an equilibrium layer's solve that the client affords in training"

    @property
    def client(self) -> State:
        return as_state(self.held)


@dataclass(frozen=True)
class ClientResult:
    """What came of it."""

    who: int
    held: HeldState
    upload: Upload
    gradient_samples: int
    finite: bool
    "is there neither NaN nor infinity in what it keeps and sends?"
    solves: dict[str, Solves] = field(default_factory=dict)
    "what the solves of each of the model's equilibrium layers came to"
    seconds: float | None = None
    "that it took, where it was worked on alone"

    @property
    def client(self) -> State:
        return as_state(self.held)


@dataclass(frozen=True)
class ClientModel:
    """A model to be scored on a client's data."""

    who: int
    vector: Tensor
    buffers: Tensor | None = None
    looks_up: bool = False
    "the client's own samples are part of it (see `Algorithm.predictor`)"


ModelKind = Literal["personal", "consensus", "unseen"]
"""Which model of a client: its own; that with what all agree on; or what one that took no part makes of the result."""


SampleScores = np.ndarray
"""One client's (2, n) array: loss and metric of each of its samples."""


class Executor(ABC):
    """Trains and scores clients."""

    mode: ClassVar[str]
    """The value of `engine.mode` that chooses it; part of summary.json."""

    def __init__(self, task: Task, federation: Federation, algorithm: Algorithm, seed: int, workers: int):
        self.task, self.federation, self.algorithm = task, federation, algorithm
        self.seed, self.workers = seed, workers

    @abstractmethod
    def train(self, round: int, jobs: Sequence[ClientJob], stopped: Callable[[], bool]) -> Iterator[ClientResult]:
        """Every job's `local`, in the order of the jobs; ends early when `stopped`."""

    @abstractmethod
    def models(
        self, round: int, jobs: Sequence[ClientJob], kind: ModelKind
    ) -> Iterator[tuple[ClientModel | None, int]]:
        """Every job's model of a kind (None where the method has none), and the samples trained on for it."""

    def maker(self, kind: ModelKind) -> Callable[..., Tensor | None]:
        """What makes models of a kind."""
        if kind == "consensus":
            assert isinstance(self.algorithm, HasConsensusModel)
            return self.algorithm.consensus_model
        return self.algorithm.adapt if kind == "unseen" else self.algorithm.personal_model

    def looks_up(self, kind: ModelKind) -> bool:
        return kind != "consensus" and isinstance(self.algorithm, PredictsFromSamples)

    def predictor(self, module: nn.Module, who: int) -> nn.Module:
        """What a client predicts with whose samples are part of its model."""
        assert isinstance(self.algorithm, PredictsFromSamples)
        return self.algorithm.predictor(module, self.own(who))

    def own(self, who: int) -> ClientSamples:
        pairs = [
            self.federation.gather(torch.from_numpy(s[who]))
            for s in (self.federation.train, self.federation.validation)
        ]
        assert self.task.head is not None
        return ClientSamples(pairs[0], pairs[1], self.task.head, self.task.metric)

    @abstractmethod
    def score(self, models: Sequence[ClientModel], indices: Sequence[np.ndarray]) -> Iterator[SampleScores]:
        """Each model on the samples listed for it."""

    @abstractmethod
    def score_one(self, vector: Tensor, indices: np.ndarray) -> SampleScores:
        """One model on many samples, whoever owns them."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was taken (threads, settings of torch)."""
