"""Local training of a stack of clients at once."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import DataSplit
from equipoise.data.federation import STREAMED_BYTES, BatchBuffer, Federation
from equipoise.executors.traced_gradient import StackedModule
from equipoise.optimizers import Rate
from equipoise.parameter_space import Part
from equipoise.representations.head_problem import HeadSamples
from equipoise.representations.points import HEAD
from equipoise.representations.terms import LossTerm
from equipoise.training.batches import ORDINARY, Batch, Draw
from equipoise.training.feature_memory import FeatureMemory
from equipoise.training.head_statistics import client_class_sums, head_samples, mean_loss, pull_back
from equipoise.training.local_trainer import LocalTrainer
from equipoise.training.sample_gradients import SampleGradients

_PLANNED_STEPS = 16  # whose targets are fetched together


class StackWorker:
    """What a thread works with: the stacked model, which all threads share, and what only one can use at a time."""

    def __init__(self, module: StackedModule):
        self.module = module
        self.scoring = copy.deepcopy(module.task.module).eval()
        self.gradients = SampleGradients(module.task)
        self.memory = BatchBuffer()
        self._last: tuple[Tensor, tuple[int, int], Tensor] | None = None

    def stacked(self, x: Tensor, lead: tuple[int, int]) -> Tensor:
        """Return inputs as (client, sample, ...); the same tensor as last time if they are in the same memory."""
        if self._last is None or self._last[0] is not x or self._last[1] != lead:
            self._last = x, lead, x.view(*lead, *x.shape[1:])
        return self._last[2]


class StackedTrainer(LocalTrainer):
    """The data of a stack of clients.

    Clients with fewer samples or steps than others are padded, and no longer move when they are done.
    """

    def __init__(
        self,
        worker: StackWorker,
        federation: Federation,
        algorithm: Algorithm,
        seed: int,
        round: int,
        who: Sequence[int],
        purpose: str,
        factor: float = 1.0,
    ):
        """Create the trainer of a stack.

        Args:
            worker: the stacked model, and memory for batches.
            federation: the clients and their data.
            algorithm: the algorithm, whose settings determine batches and steps.
            seed: seed of the run.
            round: number of the round.
            who: the clients in the stack.
            purpose: what the training is for, part of the key of its random numbers.
            factor: factor of all learning rates.
        """
        self.worker, self.module, self.federation, self.algorithm = worker, worker.module, federation, algorithm
        self.task = worker.module.task
        self.space, self.dtype = self.task.space, self.task.dtype
        self.seed, self.round, self.purpose, self.who = seed, round, purpose, who
        self.factor, self.features = factor, FeatureMemory()
        self.samples = np.zeros(len(who), dtype=np.int64)
        self.lengths = federation.train.lengths[list(who)].tolist()
        self.size = self._column(self.lengths)
        # Models with equilibrium layers are not stacked.
        self.iterations = self.iterations_performed = torch.ones_like(self.size)

    def _column(self, values: Sequence[float]) -> Tensor:
        """Return one number per client."""
        return torch.tensor(values, dtype=self.dtype, device=self.task.device).unsqueeze(1)

    def open(self, start: Tensor, part: Part, mask: Tensor | None = None) -> Tensor:
        return start.clone(memory_format=torch.contiguous_format)

    # A batch may contain only the first clients of the stack, when the others are done.

    def gradient(
        self, v: Tensor, batch: Batch, part: Part, term: LossTerm | None = None, term_only: bool = False
    ) -> Tensor:
        first = len(batch.x)
        found = self.module.gradient(v if first == len(v) else v[:first], batch, part, term, term_only)
        return found if first == len(v) else nn.functional.pad(found, (0, 0, 0, len(v) - first))

    def step(self, v: Tensor, batch: Batch, part: Part, lr: Rate, term: LossTerm | None = None) -> None:
        first = len(batch.x)
        if first < len(v):
            v, lr = v[:first], lr[:first] if isinstance(lr, Tensor) else lr
        self.module.step(v, batch, part, lr, term)

    @property
    def local_steps(self) -> Tensor:
        return self._column([self.steps_of(n) for n in self.lengths])

    def shares(self, batch: Batch) -> Tensor:
        assert batch.weights is not None  # 1 / (samples in the batch), or 0
        counts = (batch.weights > 0).sum(1, keepdim=True)
        return nn.functional.pad(counts, (0, 0, 0, len(self.size) - len(counts))) / self.size

    def loss(self, v: Tensor, *, of: DataSplit = "train") -> Tensor:
        self._check_covered("loss")
        found = []
        for who, row in zip(self.who, v.expand(len(self.who), -1), strict=True):
            x, y, count = self.own_samples(who, of)
            call = partial(functional_call, self.worker.scoring, self.space.views(row))
            found.append(mean_loss(self.task, call, x, y) if count else torch.zeros_like(self.size[0]))
        return torch.stack(found)

    def class_sums(self, v: Tensor, of: Callable[[Tensor], Tensor], *, at: str = HEAD) -> Tensor:
        self._check_covered("class_sums")
        scoring, found = self.worker.scoring, []
        for who, row in zip(self.who, v, strict=True):
            x, y = self.federation.gather(torch.from_numpy(self.federation.train[who]))
            call = partial(functional_call, scoring, self.space.views(row))
            found.append(client_class_sums(self.task, call, scoring, x, y, of, at))
        return torch.stack(found)

    @property
    def clients(self) -> Sequence[int]:
        return self.who

    def head_samples(self, who: int, v: Tensor, of: DataSplit) -> HeadSamples:
        scoring = self.worker.scoring
        call = partial(functional_call, scoring, self.space.views(v))
        return head_samples(self.task, call, scoring, *self.own_samples(who, of))

    def pull_back(self, who: int, v: Tensor, adjoint: Tensor, of: DataSplit) -> Tensor:
        scoring, total, v = self.worker.scoring, torch.zeros_like(v), v.detach().clone().requires_grad_()
        with torch.enable_grad():
            call = partial(functional_call, scoring, self.space.views(v))
        x, y, _ = self.own_samples(who, of)
        for features, bars in pull_back(self.task, call, scoring, x, y, adjoint):
            total += torch.autograd.grad(features, v, bars)[0]
        return total

    def batches(
        self,
        epochs: int,
        steps: int | None,
        stream: int | None,
        active: Tensor | None,
        term: LossTerm | None = None,
        draw: Draw = ORDINARY,
    ) -> Iterator[tuple[Batch, Tensor | None]]:
        owned = [self.federation.train[i] for i in self.who]
        batch = min(draw.size or self.algorithm.batch, max(len(indices) for indices in owned))
        plans = []
        mask = [True] * len(owned) if active is None else active.flatten().tolist()
        self.begin_operation()
        for k, (indices, is_active) in enumerate(zip(owned, mask, strict=True)):
            plans.append(self.plan(k, len(indices) if is_active else 0, batch, epochs, steps, stream, draw))
        length = max(len(p) for p in plans)
        batch = max(p.shape[1] for p in plans)
        # A batch that is not full is padded with one of the client's own samples, with weight zero.
        padding = np.array([indices[0] for indices in owned])
        order = np.broadcast_to(padding[:, None], (length, len(plans), batch)).copy()
        filled = np.zeros(order.shape, dtype=bool)
        for k, (p, indices) in enumerate(zip(plans, owned, strict=True)):
            rows = slice(len(p)), k, slice(p.shape[1])
            filled[rows] = p >= 0
            order[rows] = np.where(p >= 0, indices[p], indices[0])
        counts = filled.sum(-1, keepdims=True)
        # All steps are planned on the host and copied at once, so that a step needs nothing from there.
        weights = torch.from_numpy(filled / np.maximum(counts, 1)).to(self.dtype).to(self.task.device)
        done = np.arange(length)[:, None] >= [len(p) for p in plans]
        done_rows = torch.from_numpy(done.nonzero()[1]).to(self.task.device).split(done.sum(1).tolist())
        firsts = active_prefix_sizes(~done)
        flat = self.federation.index(order).flatten(1)
        begin = 0
        for first, group in groupby(firsts):
            for count in _portions(len(list(group)), self._steps_at_once(first * batch)):
                some = slice(begin, begin + count)
                begin += count
                samples = self._samples(flat[some, : first * batch], (first, batch))
                parts = zip(samples, weights[some, :first].unbind(), done_rows[some], strict=True)
                for (x, y), weight, rows in parts:
                    yield Batch(x, y, weight), rows if len(rows) else None

    def _samples(self, rows: Tensor, lead: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of some steps, each from a row of sample numbers, as (client, sample, ...)."""
        shape, every = (len(rows), *lead), rows.flatten()
        if self.federation.streams_to is not None:
            x, y = (t.view(*shape, *t.shape[1:]) for t in self.federation.gather(every, self.worker.memory))
            yield from zip(x.unbind(), y.unbind(), strict=True)
            return
        # Targets are small, so those of several steps are fetched in one call; inputs should stay in the cache.
        y = self.federation.targets(every)
        for row, target in zip(rows.unbind(), y.view(*shape, *y.shape[1:]).unbind(), strict=True):
            yield self.worker.stacked(self.federation.inputs(row, self.worker.memory), lead), target

    def _steps_at_once(self, samples: int) -> int:
        """Return the number of steps, of so many samples each, whose samples are fetched together."""
        if self.federation.streams_to is None:
            return _PLANNED_STEPS
        return max(1, STREAMED_BYTES // max(1, samples * self.federation.x[0].nbytes))


def _portions(count: int, most: int) -> list[int]:
    """Divide a number of steps into portions of at most so many."""
    return [min(most, count - begin) for begin in range(0, count, most)]


def active_prefix_sizes(active: np.ndarray) -> list[int]:
    """Return, for each step, how many of the first clients of a stack to compute.

    Clients are stacked with the longest training first, so that those that are done are at the end. Every different
    number of clients needs its own trace, so the numbers are rounded up to a few levels, each 3/4 of the next.

    Args:
        active: matrix (steps, clients) that tells whether a client has samples in a step.
    """
    clients = active.shape[1]
    sizes = [clients]
    while sizes[-1] > 1:
        sizes.append(max(1, sizes[-1] * 3 // 4))
    levels = np.array(sizes[::-1])
    last = clients - np.argmax(active[:, ::-1], axis=1)
    return levels[np.searchsorted(levels, last)].tolist()  # type: ignore[no-any-return]
