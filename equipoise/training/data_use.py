"""What an algorithm does with a client's samples, found by calling its hooks once, for sample-level privacy.

Only operations whose result is a sum over samples, each of which can be clipped, can be noised. An algorithm that uses
others is refused.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import PredictsFromSamples, exchanges_of
from equipoise.algorithms.local_data import BatchGradient, Start
from equipoise.algorithms.schema import ShapeProbe
from equipoise.errors import EquipoiseError
from equipoise.representations.terms import BatchTerm, LossTerm
from equipoise.state import State

OPERATIONS = {
    "loss": "the loss on all samples, without noise",
    "class_counts": "the numbers of samples of each class",
    "gradient_squares": "norms of gradients, without noise",
    "full_gradient": "gradients on all samples, without noise",
    "class_sums": "sums over the samples of each class",
    "moments": "second moments of features",
    "head_problem": "the features of all samples, to fit the head",
    "body_gradient": "a function of all samples' features",
}
"""Operations of `LocalData` that noise on sums of clipped gradients does not cover, in words."""


def refusal(algorithm: str, what: str) -> EquipoiseError:
    """Return the error for an algorithm that noise on gradients does not cover.

    Args:
        algorithm: its name.
        what: what it uses of the samples.
    """
    return EquipoiseError(
        f"privacy.unit = 'sample' does not cover {algorithm}, which uses {what}; use privacy.unit = 'client', or an "
        "algorithm that trains by gradient steps alone"
    )


@dataclass(frozen=True)
class Pass:
    """One operation on the samples: steps with noise on the gradients of their batches."""

    epochs: int
    steps: int | None = None
    "number of batches, in place of epochs"
    repeat: int = 1
    "number of gradients of each batch"
    whole: bool = False
    "whether it is one sum over all samples, with noise once"


@dataclass(frozen=True)
class DataUse:
    """The operations that each hook of an algorithm does on a client's samples."""

    update: tuple[Pass, ...]
    "those of a round"
    personal: tuple[Pass, ...]
    "those that make the personal model of a client that trained"
    adapted: tuple[Pass, ...]
    "those that make the model of a client that took no part in training"

    @staticmethod
    def of(algorithm: Algorithm, start: Start) -> "DataUse":
        """Find what an algorithm does; raise an error if noise does not cover it.

        Args:
            algorithm: the algorithm.
            start: what is known before the first round.
        """
        name = type(algorithm).__name__
        if isinstance(algorithm, PredictsFromSamples):
            raise refusal(name, "a client's samples themselves when it predicts")
        if exchanges_of(algorithm) > 1:
            raise refusal(name, "several exchanges in a round, and what its clients compute between them")
        client = algorithm.init_client(start)
        down = algorithm.broadcast(algorithm.init_server(start), 0)

        def passes(hook: Callable[..., Any]) -> tuple[Pass, ...]:
            probe = UseProbe(start, algorithm)
            hook(client, down, probe)
            return tuple(probe.passes)

        return DataUse(passes(algorithm.local_update), passes(algorithm.personal_model), passes(algorithm.adapt))


class UseProbe(ShapeProbe):
    """Local data that train nothing, and record what they were asked for."""

    def __init__(self, start: Start, algorithm: Algorithm):
        super().__init__(start)
        self.algorithm = algorithm
        self.passes: list[Pass] = []

    def descend(self, start: Tensor, **given: Any) -> Tensor:
        check_term(given.get("term"), type(self.algorithm).__name__)
        epochs, steps = given.get("epochs"), given.get("steps")
        if steps is None and epochs is None:
            steps = self.algorithm.steps
        self.passes.append(Pass(epochs or self.algorithm.epochs, steps, given.get("repeat", 1)))
        return start.clone()

    def walk(self, start: State, step: Callable[[State, BatchGradient], State], **given: Any) -> State:
        name = type(self.algorithm).__name__
        check_term(given.get("term"), name)
        check_draw(given.get("size"), given.get("portion", 1.0), name)
        epochs, steps = given.get("epochs"), given.get("steps")
        if steps is None and epochs is None:
            steps = self.algorithm.steps
        asked: Counter[int] = Counter()

        def grad(v: Tensor, which: int = 0, /) -> Tensor:
            asked[which] += 1
            return torch.zeros_like(v)

        found = step(start, grad)
        # Batches of a step have orders of their own, so each of them is an operation by itself.
        self.passes.extend(Pass(epochs or self.algorithm.epochs, steps, repeat) for repeat in asked.values())
        return State({name: t.clone() for name, t in found.items()})

    def term_gradient(self, term: LossTerm, v: Tensor, **given: Any) -> Tensor:
        check_term(term, type(self.algorithm).__name__)
        steps = given.get("steps")
        self.passes.append(Pass(1, steps, whole=steps is None))
        return super().term_gradient(term, v)

    def _refused(self, operation: str) -> Never:
        raise refusal(type(self.algorithm).__name__, OPERATIONS[operation])

    @property
    def class_counts(self) -> Tensor:
        self._refused("class_counts")

    def loss(self, v: Tensor, **_: object) -> Never:
        self._refused("loss")

    def gradient_squares(self, v: Tensor) -> Never:
        self._refused("gradient_squares")

    def full_gradient(self, v: Tensor, **_: object) -> Never:
        self._refused("full_gradient")

    def class_sums(self, v: Tensor, of: object, **_: object) -> Never:
        self._refused("class_sums")

    def moments(self, v: Tensor, **_: object) -> Never:
        self._refused("moments")

    def head_problem(self, v: Tensor, **_: object) -> Never:
        self._refused("head_problem")

    def body_gradient(self, v: Tensor, objective: object, **_: object) -> Never:
        self._refused("body_gradient")


def check_term(term: LossTerm | None, algorithm: str) -> None:
    """Raise an error if a term is one of whole batches, or variance-reduced: its gradients are then of two models."""
    if isinstance(term, BatchTerm):
        raise refusal(algorithm, "a loss of whole batches, which has no gradients of single samples")
    if term is not None and term.anchor is not None:
        raise refusal(algorithm, "variance reduction, whose corrections are gradients without noise")


def check_draw(size: int | None, portion: float, algorithm: str) -> None:
    """Raise an error if batches are not those that the accounting knows: of the algorithm's size, from all samples."""
    if size is not None or portion != 1:
        raise refusal(algorithm, "batches of a size of their own, or of a part of the samples")
