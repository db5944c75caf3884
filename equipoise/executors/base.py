"""The interface of executors, which train and score the clients of a round, and the types that they exchange."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import HasConsensusModel, PredictsFromSamples, diagnostics_of
from equipoise.algorithms.local_data import ClientSamples
from equipoise.config.engine import Schedule
from equipoise.data.federation import Federation
from equipoise.distributed.shards import ClientShards
from equipoise.equilibrium import Solves
from equipoise.executors.sample_scores import SampleScores
from equipoise.state import State, Upload, stack
from equipoise.torch_device import CPU, is_accelerator
from equipoise.training.buffers import BUFFERS
from equipoise.training.feature_memory import FeatureMemory
from equipoise.training.sample_gradients import SampleGradients
from equipoise.training.sample_privacy import PrivateSteps, SamplePrivacy
from equipoise.training.task import Task

FIXED_POINTS = "fixed_points."
"""Prefix of the fixed points of a client's samples in its saved state, if the model keeps them."""
SENT = "sent."
"""Prefix of a client's last message in its saved state, if the algorithm needs it."""
RELEASED = "released."
"""Prefix of the last message of a deployed client as the server received it, if privacy needs it."""
_KEPT = (FIXED_POINTS, SENT, RELEASED)
TRAINING = "batches"
"""The purpose of local training, in the key of its random numbers; models made for evaluation have other purposes."""


def algorithm_state(state: State) -> State:
    """Return a client's state without what the engine keeps in it: the part that the algorithm knows."""
    if not any(k == BUFFERS or k.startswith(_KEPT) for k in state):
        return state
    return State({k: t for k, t in state.items() if k != BUFFERS and not k.startswith(_KEPT)})


def with_engine_state(state: State, task: Task, samples: int, buffers: Tensor | None = None) -> State:
    """Return an initial state extended by what the engine keeps: buffers and fixed points.

    Args:
        state: the algorithm's initial state of a client.
        task: the task, whose model determines what is kept.
        samples: largest number of training samples that the client may have.
        buffers: the client's buffers; by default those of the initial model.
    """
    kept = {FIXED_POINTS + name: t for name, t in task.fixed_points(samples).items()}
    if len(task.buffers):
        kept[BUFFERS] = task.buffers if buffers is None else buffers
    return State(state, **kept)


@dataclass(frozen=True)
class StackRow:
    """One client's state in a stack of states, extracted only when needed."""

    stack: State
    index: int


HeldState = State | StackRow


def as_state(held: HeldState) -> State:
    """Return the state itself, extracted from its stack if necessary."""
    return held.stack.row(held.index) if isinstance(held, StackRow) else held


def stack_states(held: Sequence[HeldState], device: torch.device = CPU) -> State:
    """Stack clients' states on a device, without what the engine keeps in them.

    If they are all rows of one stack in their order, that stack is returned without copying.

    Args:
        held: the states.
        device: where the clients are trained.
    """
    first = held[0]
    whole = first.stack if isinstance(first, StackRow) else None
    if whole is not None and len(next(iter(whole.values()), ())) == len(held):
        in_order = (isinstance(h, StackRow) and h.stack is whole and h.index == k for k, h in enumerate(held))
        if all(in_order):
            return whole
    stacked = stack([algorithm_state(as_state(h)) for h in held])
    if not is_accelerator(device):
        return stacked
    # What all of them share crosses once, and is expanded again there.
    return State({k: t[0].to(device).expand(t.shape) if t.stride(0) == 0 else t.to(device) for k, t in stacked.items()})


class HostStates:
    """Copies results of training to the host: a stack as a whole, once for all clients in it."""

    def __init__(self) -> None:
        self.stacks: dict[int, tuple[State, State]] = {}

    def of(self, held: HeldState) -> State:
        """Return a client's state on the host."""
        if not isinstance(held, StackRow):
            return held.to(CPU)
        if id(held.stack) not in self.stacks:
            self.stacks[id(held.stack)] = held.stack, held.stack.to(CPU)
        return self.stacks[id(held.stack)][1].row(held.index)


@dataclass(frozen=True)
class ClientJob:
    """A client to train or to make a model for, with its state and the message from the server."""

    who: int
    held: HeldState
    down: State
    budget: int | None = None
    "limit on the iterations of an equilibrium solve in training, set by the client's device class"

    @property
    def client(self) -> State:
        return as_state(self.held)

    def on(self, device: torch.device) -> "ClientJob":
        """Return the job with the client's state on a device."""
        return replace(self, held=self.client.to(device))


@dataclass(frozen=True)
class ClientResult:
    """The result of a client's local training."""

    who: int
    held: HeldState
    upload: Upload
    gradient_samples: int
    finite: bool
    "whether its new state and its upload have only finite numbers"
    solves: dict[str, Solves] = field(default_factory=dict)
    "statistics of the solves of each equilibrium layer, by the layer's name"
    seconds: float | None = None
    "duration of its training, if it was trained alone"
    diagnostics: dict[str, float] = field(default_factory=dict)
    "numbers about its update, if the algorithm has any (see `ReportsDiagnostics`)"
    short: bool = False
    "whether its message was shorter than the clip, where privacy's clip adapts"

    @property
    def client(self) -> State:
        return as_state(self.held)


@dataclass(frozen=True)
class ClientModel:
    """A model to score on a client's data."""

    who: int
    vector: Tensor
    buffers: Tensor | None = None
    looks_up: bool = False
    "whether it looks up the client's own samples when it predicts (see `PredictsFromSamples`)"


ModelKind = Literal["personal", "consensus", "unseen"]
"""Which model of a client: its personal model, its consensus model, or the model of a client unseen in training."""


class Executor(ABC):
    """Base of the two executors, which train and score clients."""

    mode: ClassVar[str]
    """The value of `engine.mode` that selects this executor; it is written to summary.json."""

    def __init__(
        self,
        task: Task,
        federation: Federation,
        algorithm: Algorithm,
        schedule: Schedule,
        workers: int,
        shards: ClientShards,
    ):
        """Create an executor.

        Args:
            task: the task to train for.
            federation: the clients and their data.
            algorithm: the algorithm whose hooks are called.
            schedule: the schedule of the run, with its seed.
            workers: number of threads.
            shards: the division of the clients; only clients of one shard are computed in one call.
        """
        self.task, self.federation, self.algorithm = task, federation, algorithm
        self.schedule, self.seed, self.workers, self.shards = schedule, schedule.seed, workers, shards
        self.features = FeatureMemory()
        self.privacy: SamplePrivacy | None = None
        "how training is made private, if single samples are hidden"
        self.settings = ExitStack()
        "settings of torch that are restored at the end"

    def prepare(self, report: Callable[[str], None]) -> None:
        """Do, before the first round of a run, what takes long: compile steps, if the engine settings ask for it.

        Args:
            report: receives sentences about what was done.
        """
        return

    def private_steps(
        self, gradients: SampleGradients | None, who: Sequence[int], round: int, purpose: str
    ) -> PrivateSteps | None:
        """Return what makes the steps of clients private; None if single samples are not hidden."""
        if self.privacy is None or gradients is None:
            return None
        names, lengths = [self.federation.names[k] for k in who], self.federation.train.lengths
        return PrivateSteps(self.privacy, gradients, names, [int(lengths[k]) for k in who], round, purpose)

    def rate_factor(self, round: int, purpose: str) -> float:
        """Return the factor of learning rates in a round; only training follows the schedule."""
        return self.algorithm.schedule.factor(round, self.schedule.rounds) if purpose == TRAINING else 1.0

    @abstractmethod
    def train(self, round: int, jobs: Sequence[ClientJob], stopped: Callable[[], bool]) -> Iterator[ClientResult]:
        """Yield the result of each job's local update, in the order of the jobs; end early when `stopped()` is true."""

    def diagnostics(self, client: State, down: State) -> list[dict[str, float]]:
        """Return the diagnostics of a client's update, or of each client in a stack."""
        found = {name: t.flatten().tolist() for name, t in diagnostics_of(self.algorithm, client, down).items()}
        return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]

    @abstractmethod
    def models(
        self, round: int, jobs: Sequence[ClientJob], kind: ModelKind
    ) -> Iterator[tuple[ClientModel | None, int]]:
        """Yield each job's model of a kind, with the number of samples that were trained on to make it.

        The model is None if the algorithm has no models of this kind.
        """

    def maker(self, kind: ModelKind) -> Callable[..., Tensor | None]:
        """Return the hook of the algorithm that makes models of a kind."""
        if kind == "consensus":
            assert isinstance(self.algorithm, HasConsensusModel)
            return self.algorithm.consensus_model
        return self.algorithm.adapt if kind == "unseen" else self.algorithm.personal_model

    def looks_up(self, kind: ModelKind) -> bool:
        """Tell whether models of a kind look up the client's own samples when they predict."""
        return kind != "consensus" and isinstance(self.algorithm, PredictsFromSamples)

    def predictor(self, module: nn.Module, who: int) -> nn.Module:
        """Return the module that a client predicts with, if its model looks up its own samples."""
        assert isinstance(self.algorithm, PredictsFromSamples)
        return self.algorithm.predictor(module, self.own(who, next(module.parameters()).device))

    def own(self, who: int, device: torch.device = CPU) -> ClientSamples:
        """Return the training and validation samples of a client, on the device of the model that looks them up."""
        pairs = []
        for split in (self.federation.train, self.federation.validation):
            x, y = self.federation.gather(torch.from_numpy(split[who]))
            pairs.append((x.to(device), y.to(device)))
        assert self.task.head is not None
        return ClientSamples(pairs[0], pairs[1], self.task.head, self.task.metric)

    @abstractmethod
    def score(self, models: Sequence[ClientModel], indices: Sequence[np.ndarray]) -> Iterator[SampleScores]:
        """Yield the scores of each model on the samples listed for it."""

    @abstractmethod
    def score_pieces(
        self, vector: Tensor, pieces: Sequence[np.ndarray], buffers: Tensor | None = None
    ) -> Iterator[SampleScores]:
        """Yield the scores of one model on each piece, in the order of the pieces, which are computed in parallel.

        Args:
            vector: the model.
            pieces: lists of samples, of any clients. The caller chooses them so that they do not depend on the number
                of processes, because the last digits of scores depend on what is computed in one call.
            buffers: the model's buffers, if it has any.
        """

    def close(self) -> None:
        """Stop threads, and restore the settings of torch."""
        self.settings.close()
