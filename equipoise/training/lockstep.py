"""Several vectors that move in lock-step on the same batches, by steps of the algorithm's own."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import BatchGradient
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace, Part
from equipoise.representations.terms import LossTerm
from equipoise.state import State
from equipoise.training.batches import Batch, Draw
from equipoise.training.sample_privacy import PrivateSteps


class Trainer(Protocol):
    """What a walk needs of a `LocalTrainer`, where these methods are described."""

    algorithm: Algorithm
    space: ParameterSpace
    size: Tensor
    samples: np.ndarray
    private: PrivateSteps | None

    def open(self, start: Tensor, part: Part, mask: Tensor | None = None) -> Tensor: ...

    def batches(
        self,
        epochs: int,
        steps: int | None,
        stream: int | None,
        active: Tensor | None,
        term: LossTerm | None = None,
        draw: Draw = ...,
    ) -> Iterator[tuple[Batch, Tensor | None]]: ...

    def gradient(
        self, v: Tensor, batch: Batch, part: Part, term: LossTerm | None = None, term_only: bool = False
    ) -> Tensor: ...

    def private_gradient(
        self,
        private: PrivateSteps,
        v: Tensor,
        batch: Batch,
        part: Part,
        mask: Tensor | None,
        term: LossTerm | None,
        done: Tensor | None,
        term_only: bool = False,
    ) -> Tensor: ...

    def constrained_model(self, v: Tensor) -> Tensor: ...

    def statistics_of(self, v: Tensor) -> Tensor | None: ...

    def load_statistics(self, statistics: Tensor) -> None: ...

    def read_statistics(self) -> Tensor | None: ...

    def record_statistics(self, v: Tensor, statistics: Tensor) -> None: ...


def walk(
    trainer: Trainer,
    start: State,
    step: Callable[[State, BatchGradient], State],
    term: LossTerm | None,
    epochs: int,
    steps: int | None,
    stream: int,
    active: Tensor | None,
    draw: Draw,
) -> State:
    """Move vectors step by step; see `LocalData.walk`.

    Args:
        trainer: whose batches and gradients are used.
        start: the vectors to start from.
        step: computes the next vectors from the last ones and the gradients of the step.
        term: takes the place of the loss.
        epochs: passes over the samples.
        steps: number of steps, in place of epochs.
        stream: key of the order of the batches.
        active: mask of the clients that move.
        draw: size and number of the batches of a step, and the share of the samples that they come from.
    """
    models = [name for name, t in start.items() if t.ndim == trainer.size.ndim and t.shape[-1] == trainer.space.size]
    if not models:
        raise EquipoiseError(f"{_name(trainer)} calls data.walk without a vector of the model's shape; add the model")
    state, none_moves = start, active is not None and not bool(active.any())
    found = [trainer.statistics_of(start[name]) for name in models]
    statistics = [each for each in found if each is not None]
    if not none_moves:
        gradients = Gradients(trainer, trainer.open(start[models[0]], "all"), term, statistics)
        before = trainer.samples.copy()
        for batches, done in _steps(trainer.batches(epochs, steps, stream, active, term, draw), draw.per_step):
            last, state = state, step(state, gradients.on(batches, done))
            gradients.check()
            if state.keys() != start.keys():
                raise EquipoiseError(
                    f"a step of {_name(trainer)} in data.walk returns {sorted(state)}; it must return the fields that "
                    f"it was given, {sorted(start)}"
                )
            state = State({k: trainer.constrained_model(t) if k in models else t for k, t in state.items()})
            if done is not None:  # a client that has done its steps waits for the others
                state = State({k: _restored(t, last[k], done) for k, t in state.items()})
        planned = trainer.samples - before
        trainer.samples += planned * gradients.each_step // draw.per_step - planned
    # Results have memory of their own, by which their statistics are recognised.
    result = State({name: t.clone(memory_format=torch.contiguous_format) for name, t in state.items()})
    for name, own in zip(models, statistics, strict=False):
        trainer.record_statistics(result[name], own)
    return result


def _name(trainer: Trainer) -> str:
    return type(trainer.algorithm).__name__


def _steps(
    batches: Iterator[tuple[Batch, Tensor | None]], per_step: int
) -> Iterator[tuple[list[Batch], Tensor | None]]:
    """Yield the batches of each step; all but the last are copied, because the next one may take their memory."""
    step: list[Batch] = []
    for batch, done in batches:
        last = len(step) + 1 == per_step
        step.append(batch if last else batch._replace(x=batch.x.clone(), y=batch.y.clone()))
        if last:
            yield step, done
            step = []


def _restored(after: Tensor, before: Tensor, rows: Tensor) -> Tensor:
    """Return a stack with some rows as they were before."""
    restored = after.clone()
    restored[rows] = before[rows]
    return restored


class Gradients:
    """The gradients of one step after the other, and how often they were asked for."""

    def __init__(self, trainer: Trainer, v: Tensor, term: LossTerm | None, statistics: list[Tensor]):
        """Prepare for the first step.

        Args:
            trainer: computes the gradients.
            v: the vector that it computes them at.
            term: takes the place of the loss.
            statistics: BatchNorm statistics of the models, if they follow models.
        """
        self.trainer, self.v, self.term, self.statistics = trainer, v, term, statistics
        rule = trainer.algorithm
        self.decay = 0.0 if rule.optimizer == "adamw" or term is not None else rule.weight_decay
        self.asked: Counter[int] = Counter()
        self.expected: Counter[int] | None = None
        "how often the first step asked for each of its batches"

    @property
    def each_step(self) -> int:
        """Return the number of gradients of a step."""
        return (self.expected or Counter()).total()

    def on(self, batches: list[Batch], done: Tensor | None) -> BatchGradient:
        """Return the gradients on the batches of the next step."""
        self.asked = Counter()

        def grad(v: Tensor, which: int = 0, /) -> Tensor:
            position = self.asked.total()
            self.asked[which] += 1
            if self.statistics:
                self.trainer.load_statistics(self.statistics[min(position, len(self.statistics) - 1)])
            found = self._gradient(v, batches[which], done)
            after = self.trainer.read_statistics()
            if after is not None and position < len(self.statistics):
                self.statistics[position] = after
            return found

        return grad

    def _gradient(self, v: Tensor, batch: Batch, done: Tensor | None) -> Tensor:
        trainer, term, alone = self.trainer, self.term, self.term is not None
        self.v.copy_(v)
        if trainer.private is None:
            found = trainer.gradient(self.v, batch, "all", term, term_only=alone).clone()
        else:
            found = trainer.private_gradient(trainer.private, self.v, batch, "all", None, term, done, term_only=alone)
        return found + self.decay * self.v if self.decay else found

    def check(self) -> None:
        """Raise an error if a step asked for other gradients than the first: costs and noise are planned by that."""
        if self.expected is None:
            self.expected = self.asked
        elif self.asked != self.expected:
            raise EquipoiseError(
                f"the steps of {_name(self.trainer)} in data.walk differ in how often they ask for gradients; every "
                "step must ask for the same"
            )
