"""The one inner loop of the library: gradient steps on a vector, or on a stack of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import randomness
from equipoise.algorithms.base import Algorithm, DataSplit
from equipoise.errors import EquipoiseError
from equipoise.optimizers import LocalOptimizer
from equipoise.parameter_space import ParameterSpace, Part, linear_head
from equipoise.representations.head_features import HeadTargets
from equipoise.representations.head_moments import Moments
from equipoise.representations.points import HEAD, ForwardHook, RepresentationPoint
from equipoise.representations.terms import LossTerm
from equipoise.training.task import Task


def batch_indices(n: int, batch: int, epochs: int, steps: int | None, rng: torch.Generator | None) -> np.ndarray:
    """Which sample goes into which step: a (steps, batch) matrix, -1 where a batch is not full.

    Without a generator: all samples once, in their order.
    """
    if n == 0:
        return np.empty((0, batch), dtype=np.int64)
    if rng is None:
        return np.pad(np.arange(n), (0, -n % batch), constant_values=-1).reshape(-1, batch)
    in_epoch = -(-n // batch)
    total = epochs * in_epoch if steps is None else steps
    epochs = -(-total // in_epoch)
    order = np.full((epochs, in_epoch * batch), -1, dtype=np.int64)
    for row in order:
        row[:n] = torch.randperm(n, generator=rng).numpy()
    return order.reshape(-1, batch)[:total]


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    weights: Tensor | None = None
    "of the samples, where the batch is padded"
    rows: Tensor | None = None
    "which of the client's samples these are"
    probed: tuple[Tensor, ...] = ()
    "the representations of a term's probe, where they are made for many batches at once"


class LocalTrainer(ABC):
    """A client's data, or a cohort's, at work for one algorithm in one round (a `LocalData`)."""

    task: Task
    space: ParameterSpace
    size: Tensor
    seed: int
    algorithm: Algorithm
    samples: np.ndarray
    "how many samples each client has had through a backward pass"

    @property
    def outputs(self) -> int:
        return self.task.outputs

    def tap(self, name: str) -> RepresentationPoint:
        return self.task.tap(name)

    @abstractmethod
    def open(self, start: Tensor, part: Part, within: Tensor | None = None) -> Tensor:
        """A vector to work on in place, equal to `start`."""

    @abstractmethod
    def gradient(
        self, v: Tensor, batch: Batch, part: Part, term: LossTerm | None = None, term_only: bool = False
    ) -> Tensor:
        """The gradient of the batch's mean loss with respect to the part of v that moves; of the term too, or alone."""

    @abstractmethod
    def batches(
        self, epochs: int, steps: int | None, stream: int | None, only: Tensor | None, term: LossTerm | None = None
    ) -> Iterator[tuple[Batch, Tensor | None]]:
        """The batches in their order, each with a mask of the clients that are done already (None: nobody is).

        Without a stream they are not shuffled. They are made ready for the term that they are for.
        """

    @abstractmethod
    def step(self, v: Tensor, batch: Batch, part: Part, lr: float, term: LossTerm | None = None) -> None:
        """A step of plain SGD, in place."""

    def constrain(self) -> None:
        """Bring the vector back to where the model allows it to be, after a step; most allow every vector."""
        return

    def close(self, v: Tensor) -> Tensor:
        return v

    def descend(
        self,
        start: Tensor,
        *,
        part: Part = "all",
        pull: Callable[[Tensor], Tensor] | None = None,
        lr: float | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        stream: int = 0,
        repeat: int = 1,
        only: Tensor | None = None,
        within: Tensor | None = None,
        term: LossTerm | None = None,
        anchor: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if steps is None and epochs is None:
            steps = self.algorithm.steps
        lr = lr or self.algorithm.lr
        if anchor is not None and (why := self.task.why_not_twice) is not None:
            raise EquipoiseError(f"variance reduction is not possible for a model with {why}")
        moves = self.space.part(part)
        v = self.open(start, part, within)
        moving = v[..., moves]
        simple = is_plain_sgd(self.algorithm) and within is None and anchor is None
        update = None if simple else self._optimizer(lr)
        if moving.shape[-1] and (within is None or bool(within[..., moves].any())):
            for batch, done in self._steps(epochs or self.algorithm.epochs, steps, stream, repeat, only, term):
                extra = None if pull is None else pull(v)[..., moves]
                before = None if done is None else v[done]
                if update is not None:
                    if term is not None and anchor is not None:
                        amiss = anchor[1][..., moves] - self._elsewhere(anchor[0], v, batch, part, term)
                        extra = amiss if extra is None else extra + amiss
                    g = self.gradient(v, batch, part, term)
                    g = g if extra is None else g + extra
                    update(moving, g if within is None else g * within[..., moves])
                else:
                    if extra is not None and extra.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():
                        extra = extra.clone()  # a pull that is a view of v must not feel the step
                    self.step(v, batch, part, lr, term)
                    if extra is not None:
                        moving.add_(extra, alpha=-lr)
                self.constrain()
                if before is not None:  # a client that has done its steps stands still while others go on
                    v[done] = before
        return self.close(v)

    def _optimizer(self, lr: float) -> LocalOptimizer:
        settings = self.algorithm
        return LocalOptimizer(settings.optimizer, lr, settings.momentum, settings.clip)

    def _elsewhere(self, u: Tensor, v: Tensor, batch: Batch, part: Part, term: LossTerm) -> Tensor:
        """The term's gradient on the batch at u; v is as it was afterwards."""
        here = v.clone()
        v.copy_(u)
        found = self.gradient(v, batch, part, term, term_only=True).clone()
        v.copy_(here)
        self.samples += (self.shares(batch) * self.size).round().long().flatten().numpy()
        return found

    def _steps(
        self, epochs: int, steps: int | None, stream: int, repeat: int, only: Tensor | None, term: LossTerm | None
    ) -> Iterator[tuple[Batch, Tensor | None]]:
        """A batch a step, each as often as `repeat` says."""
        before = self.samples.copy()
        for step in self.batches(epochs, steps, stream, only, term):
            for _ in range(repeat):
                yield step
        self.samples += (self.samples - before) * (repeat - 1)

    def slope(self, v: Tensor, *, only: Tensor | None = None) -> Tensor:
        v = self.open(v, "all")
        self.calm()
        total = torch.zeros_like(v)
        for batch, _ in self.batches(1, None, None, only):
            total.addcmul_(self.gradient(v, batch, "all"), self.shares(batch))
        return total

    def slope_of(self, term: LossTerm, v: Tensor, *, steps: int | None = None, stream: int = 0) -> Tensor:
        v = self.open(v, "all")
        self.calm()
        total = torch.zeros_like(v)
        for batch, _ in self.batches(1, steps, None if steps is None else stream, None, term):
            g = self.gradient(v, batch, "all", term, term_only=True)
            total.addcmul_(g, self.shares(batch) if steps is None else torch.full_like(self.size, 1 / steps))
        return total

    @abstractmethod
    def class_sums(self, v: Tensor, of: Callable[[Tensor], Tensor], *, at: str = HEAD) -> Tensor:
        """See `LocalData`."""

    def calm(self) -> None:
        """No dropout, and buffers stay as they are: a gradient that is only looked at leaves no trace."""
        return

    @abstractmethod
    def moments(self, v: Tensor, *, groups: int = 1, of: DataSplit = "train") -> Moments:
        """See `LocalData`."""

    @abstractmethod
    def shares(self, batch: Batch) -> Tensor:
        """Which part of each client's samples is in the batch, of the shape of `size`."""


_LOOK = 512  # samples at a time
Of = Callable[[Tensor], Tensor]


def client_moments(
    task: Task, call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, y: Tensor, groups: int
) -> Moments:
    """Of one client's samples, as the head of `module` reads them when `call` is asked for its outputs."""
    inputs, outputs, bias = linear_head(task.space)
    points = HeadTargets(y)
    if len(y):
        features, _ = points.look(call, module.get_submodule(task.head or ""), x)
    else:
        features = x.new_empty((0, inputs - bias), dtype=task.dtype)
    if bias:
        features = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
    return Moments.of(features, points.values(y, outputs, task.dtype), groups).to(task.dtype)


def client_class_sums(
    task: Task, call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, y: Tensor, of: Of, at: str
) -> Tensor:
    """Of one client's samples, as `module` represents them when `call` is asked for its outputs."""
    if y.is_floating_point() or y.ndim != 1:
        raise EquipoiseError("the method looks at samples class by class, and here they have no one label each")
    total: Tensor | None = None
    listener = ForwardHook(module, (at,), task.head)
    try:
        with torch.no_grad():
            for part_x, part_y in zip(x.split(_LOOK), y.split(_LOOK), strict=True):
                call(part_x)
                rows = of(listener.take()[0])
                members = nn.functional.one_hot(part_y.long(), task.outputs).to(rows.dtype)
                total = members.mT @ rows if total is None else total + members.mT @ rows
    finally:
        listener.close()
    assert total is not None
    return total


def is_plain_sgd(algorithm: Algorithm) -> bool:
    """SGD that neither remembers nor clips: gradient and pull may then be applied one after the other."""
    return algorithm.optimizer == "sgd" and algorithm.momentum == 0 and algorithm.clip is None


def batch_order(seed: int, round: int, name: str, purpose: str, stream: int | None) -> torch.Generator | None:
    """The random order of a client's batches in a round."""
    if stream is None:
        return None
    return randomness.torch_generator(seed, purpose, round, name, stream)
