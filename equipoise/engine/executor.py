"""How the clients of a round are worked on: what both ways of execution offer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.data.federation import Federation
from equipoise.state import State, Upload
from equipoise.task import Task

BUFFERS = "buffers"
"""The name under which a client's own buffers (BatchNorm statistics) are kept with its state."""


@dataclass(frozen=True)
class Job:
    """A client to work on, with its state and what the server sent it."""

    who: int
    client: State
    down: State


@dataclass(frozen=True)
class Done:
    """What came of it."""

    who: int
    client: State
    upload: Upload
    gradient_samples: int


@dataclass(frozen=True)
class Model:
    """A model to be scored on a client's data."""

    who: int
    vector: Tensor
    buffers: Tensor | None = None


Scores = np.ndarray
"""One client's (2, n) array: loss and metric of each of its samples."""


class Executor(ABC):
    def __init__(self, task: Task, federation: Federation, algorithm: Algorithm, seed: int, workers: int):
        self.task, self.federation, self.algorithm = task, federation, algorithm
        self.seed, self.workers = seed, workers

    @abstractmethod
    def train(self, round: int, jobs: Sequence[Job], stopped: Callable[[], bool]) -> Iterator[Done]:
        """Every job's `local`, in the order of the jobs; ends early when `stopped`."""

    @abstractmethod
    def personal(self, round: int, jobs: Sequence[Job], unseen: bool = False) -> Iterator[tuple[Model | None, int]]:
        """Every job's personal model (None where the method has none), and the samples trained on for it.

        `unseen` clients took no part in training: their model is what `adapt` makes of the result.
        """

    @abstractmethod
    def score(self, models: Sequence[Model], indices: Sequence[np.ndarray]) -> Iterator[Scores]:
        """Each model on the samples listed for it."""

    @abstractmethod
    def score_one(self, vector: Tensor, indices: np.ndarray) -> Scores:
        """One model on many samples, whoever owns them."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was taken (threads, settings of torch)."""
