"""The inner loop of local training: gradient steps on a vector, or on a stack of vectors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise import randomness
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import BatchGradient, DataSplit
from equipoise.data.federation import Federation
from equipoise.data.purged_windows import purged_windows
from equipoise.errors import EquipoiseError
from equipoise.optimizers import LocalOptimizer, Rate, move
from equipoise.parameter_space import ParameterSpace, Part
from equipoise.representations.head_moments import Moments
from equipoise.representations.head_problem import GroupOrder, HeadProblem, HeadSamples, groups_of, strata
from equipoise.representations.points import HEAD, RepresentationPoint
from equipoise.representations.terms import LossTerm
from equipoise.state import State
from equipoise.training.batches import ORDINARY, Batch, Draw, batch_indices, batch_order, interleaved, steps_in_epoch
from equipoise.training.data_use import OPERATIONS, check_draw, check_term, refusal
from equipoise.training.feature_memory import FeatureMemory
from equipoise.training.lockstep import walk
from equipoise.training.sample_privacy import PrivateSteps
from equipoise.training.task import Task


class LocalTrainer(ABC):
    """The data of a client or a cohort, for one algorithm in one round; implements `LocalData`.

    The loop is here; the two executors supply the batches and the gradient.
    """

    task: Task
    federation: Federation
    space: ParameterSpace
    size: Tensor
    seed: int
    round: int
    algorithm: Algorithm
    factor: float
    "factor of all learning rates in this round"
    samples: np.ndarray
    "number of samples that went through a backward pass, for each client"
    features: FeatureMemory
    "what heads have read in this round"
    purpose: str
    "what the training is for, part of the key of its random numbers"
    private: PrivateSteps | None = None
    "noise on the gradients of single samples, under sample-level privacy"

    @property
    def outputs(self) -> int:
        """Return the number of outputs of the model."""
        return self.task.outputs

    def point(self, name: str) -> RepresentationPoint:
        """Look up a representation point; see `LocalData.point`."""
        return self.task.point(name)

    @abstractmethod
    def open(self, start: Tensor, part: Part, mask: Tensor | None = None) -> Tensor:
        """Return a vector to train in place, equal to `start`."""

    @abstractmethod
    def gradient(
        self, v: Tensor, batch: Batch, part: Part, term: LossTerm | None = None, term_only: bool = False
    ) -> Tensor:
        """Return the gradient of the batch's mean loss in the trained part of v, with the term or of it alone."""

    @abstractmethod
    def batches(
        self,
        epochs: int,
        steps: int | None,
        stream: int | None,
        active: Tensor | None,
        term: LossTerm | None = None,
        draw: Draw = ORDINARY,
    ) -> Iterator[tuple[Batch, Tensor | None]]:
        """Yield the batches in order, each with the rows of the clients that are already done (None if none are).

        Without a stream they are not shuffled. They are prepared for `term`. A batch need not outlive the next one.
        """

    @abstractmethod
    def step(self, v: Tensor, batch: Batch, part: Part, lr: Rate, term: LossTerm | None = None) -> None:
        """Take a step of plain SGD, in place."""

    def rate(self, lr: Rate | None) -> Rate:
        """Return the learning rate of this round: `lr`, or the algorithm's own, times the factor of the schedule."""
        return (self.algorithm.lr if lr is None else lr) * self.factor

    @property
    def lr(self) -> float:
        """Return the learning rate of the round; see `LocalData.lr`."""
        return self.algorithm.lr * self.factor

    @property
    def smallest_batch(self) -> int:
        """Return the smallest last batch of an epoch that is trained on."""
        return self.algorithm.batch if self.algorithm.drop_last else self.task.smallest_batch

    @property
    @abstractmethod
    def local_steps(self) -> Tensor:
        """Return the number of local steps; see `LocalData.local_steps`."""

    def steps_of(self, samples: int) -> int:
        """Return the number of local steps of a client with so many training samples."""
        in_epoch = steps_in_epoch(samples, self.algorithm.batch, self.smallest_batch)
        return self.algorithm.steps or self.algorithm.epochs * in_epoch

    def constrain(self) -> None:
        """Project the vector onto the constraints of the model, after a step; most models have none."""
        return

    def close(self, v: Tensor) -> Tensor:
        """Return the result of training."""
        return v

    def constrained_model(self, v: Tensor) -> Tensor:
        """Return a model projected onto its constraints; most models have none."""
        return v

    # In a walk every model has BatchNorm statistics of its own, where statistics follow models.

    def statistics_of(self, v: Tensor) -> Tensor | None:
        """Return the BatchNorm statistics that belong to a model; None where statistics do not follow models."""
        return None

    def load_statistics(self, statistics: Tensor) -> None:
        """Load what `statistics_of` has returned."""
        return

    def read_statistics(self) -> Tensor | None:
        """Return the statistics after a gradient."""
        return None

    def record_statistics(self, v: Tensor, statistics: Tensor) -> None:
        """Remember the statistics that belong to a model."""
        return

    def descend(
        self,
        start: Tensor,
        *,
        part: Part | Tensor = "all",
        pull: Callable[[Tensor], Tensor] | None = None,
        term: LossTerm | None = None,
        lr: Rate | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        repeat: int = 1,
        stream: int = 0,
        active: Tensor | None = None,
    ) -> Tensor:
        """Train from `start`; see `LocalData.descend`."""
        if steps is None and epochs is None:
            steps = self.algorithm.steps
        if self.private is not None:
            check_term(term, type(self.algorithm).__name__)
        lr, decay = self.rate(lr), self.algorithm.weight_decay
        anchor = None if term is None else term.anchor
        if anchor is not None and (why := self.task.why_not_twice) is not None:
            raise EquipoiseError(f"variance reduction is not possible for a model with {why}")
        mask = part if isinstance(part, Tensor) else None
        section: Part = "all" if isinstance(part, Tensor) else part
        moves = self.space.part(section)
        v = self.open(start, section, mask)
        moving = v[..., moves]
        in_one_go = is_plain_sgd(self.algorithm) and mask is None and anchor is None and self.private is None
        optimizer = None if in_one_go else self._optimizer(lr)
        before_steps = self.samples.copy()
        if moving.shape[-1] and (mask is None or bool(mask[..., moves].any())):
            for batch, done in self._steps(epochs or self.algorithm.epochs, steps, stream, repeat, active, term):
                extra = None if pull is None else pull(v)[..., moves]
                before = None if done is None else v[done]
                if optimizer is not None:
                    if term is not None and anchor is not None:
                        correction = anchor[1][..., moves] - self._gradient_at_anchor(
                            anchor[0], v, batch, section, term
                        )
                        extra = correction if extra is None else extra + correction
                    if self.private is None:
                        g = self.gradient(v, batch, section, term)
                    else:
                        g = self.private_gradient(self.private, v, batch, section, mask, term, done)
                    g = g if extra is None else g + extra
                    optimizer(moving, g, None if mask is None else mask[..., moves])
                else:
                    if decay:
                        extra = decay * moving if extra is None else extra + decay * moving
                    if extra is not None and extra.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():
                        extra = extra.clone()  # a pull that is a view of v must not change with the step
                    self.step(v, batch, section, lr, term)
                    if extra is not None:
                        move(moving, extra, lr)
                self.constrain()
                if before is not None:  # a client that has done its steps waits for the others
                    v[done] = before
        if anchor is not None:  # the term's gradient at the anchor was computed on the same samples
            self.samples += self.samples - before_steps
        return self.close(v)

    def walk(
        self,
        start: State,
        step: Callable[[State, BatchGradient], State],
        *,
        batches: int = 1,
        term: LossTerm | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        stream: int = 0,
        active: Tensor | None = None,
        size: int | None = None,
        portion: float = 1.0,
    ) -> State:
        """Move several vectors on the same batches; see `LocalData.walk`."""
        if steps is None and epochs is None:
            steps = self.algorithm.steps
        if self.private is not None:
            check_term(term, type(self.algorithm).__name__)
            check_draw(size, portion, type(self.algorithm).__name__)
        draw = Draw(size, portion, batches)
        return walk(self, start, step, term, epochs or self.algorithm.epochs, steps, stream, active, draw)

    def _optimizer(self, lr: Rate) -> LocalOptimizer:
        s = self.algorithm
        return LocalOptimizer(s.optimizer, lr, s.momentum, s.clip, nesterov=s.nesterov, weight_decay=s.weight_decay)

    def plan(
        self,
        position: int,
        count: int,
        batch: int,
        epochs: int,
        steps: int | None,
        stream: int | None,
        draw: Draw = ORDINARY,
    ) -> Any:
        """Assign a client's samples to the steps of an operation; see `batch_indices`.

        Args:
            position: the client's position among the trainer's clients.
            count: number of its samples; 0 if it does not take part.
            batch: batch size.
            epochs: passes over the samples.
            steps: number of batches, in place of epochs.
            stream: key of the random order; None for none.
            draw: the share of the samples in a pass, and the number of batches in a step.

        Returns:
            The (steps, batch) matrix of sample numbers.
        """
        several = range(draw.per_step)
        if self.private is not None and self.private.poisson and stream is not None and count:
            order = interleaved([self.private.batch_indices(position, epochs, steps) for _ in several])
        else:
            rng = batch_order(
                self.seed, self.round, self.federation.names[self.clients[position]], self.purpose, stream
            )
            least = self.smallest_batch if draw.size is None else self.task.smallest_batch
            given = (count, batch, epochs, steps, rng, least, draw.portion)
            order = interleaved([batch_indices(*given) for _ in several])
        if self.private is None or stream is None:
            self.samples[position] += (order >= 0).sum()
        elif count:
            self.samples[position] += self.private.expected_samples(position, order)
        return order

    def begin_operation(self) -> None:
        """Prepare for another operation on the samples, which has noise of its own."""
        if self.private is not None:
            self.private.begin()

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
    ) -> Tensor:
        """Return the gradient of a step: the sum of clipped gradients with noise, divided by the batch's size."""
        mask = None if mask is None else mask[..., self.space.part(part)]
        total = private.clipped_sum(v, batch, part, mask, term, term_only)
        waiting = () if done is None else done.tolist()
        found = private.noised(total, waiting) / private.batch_sizes(batch, total)
        missing = 0 if v.ndim == 1 else len(v) - len(found)
        return torch.nn.functional.pad(found, (0, 0, 0, missing)) if missing else found

    def _check_covered(self, operation: str) -> None:
        """Raise an error if privacy does not cover an operation on the samples."""
        if self.private is not None:
            raise refusal(type(self.algorithm).__name__, OPERATIONS[operation])

    def _gradient_at_anchor(self, u: Tensor, v: Tensor, batch: Batch, part: Part, term: LossTerm) -> Tensor:
        """Return the gradient on the batch at u of what is anchored there; v is restored afterwards."""
        here = v.clone()
        v.copy_(u)
        found = self.gradient(v, batch, part, term, term_only=term.anchored == "term").clone()
        v.copy_(here)
        return found

    def _steps(
        self, epochs: int, steps: int | None, stream: int, repeat: int, active: Tensor | None, term: LossTerm | None
    ) -> Iterator[tuple[Batch, Tensor | None]]:
        """Yield one batch per step, each `repeat` times."""
        before = self.samples.copy()
        for step in self.batches(epochs, steps, stream, active, term):
            for _ in range(repeat):
                yield step
        self.samples += (self.samples - before) * (repeat - 1)

    def reinitialised(self, v: Tensor) -> Tensor:
        """Return an initial model as another initialisation would give it; see `LocalData.reinitialised`."""
        rows = [
            self.space.shuffled(
                row, randomness.torch_generator(self.seed, "initialisation", self.federation.names[who])
            )
            for who, row in zip(self.clients, self._rows(v), strict=True)
        ]
        return torch.stack(rows) if self.size.ndim > 1 else rows[0]

    @abstractmethod
    def loss(self, v: Tensor, *, of: DataSplit = "train") -> Tensor:
        """Return the mean loss over all samples; see `LocalData.loss`."""

    def full_gradient(self, v: Tensor, *, active: Tensor | None = None) -> Tensor:
        """Return the gradient of the mean loss over all samples; see `LocalData.full_gradient`."""
        self._check_covered("full_gradient")
        v = self.open(v, "all")
        self.eval_mode()
        total = torch.zeros_like(v)
        for batch, _ in self.batches(1, None, None, active):
            total.addcmul_(self.gradient(v, batch, "all"), self.shares(batch))
        return total

    def gradient_squares(self, v: Tensor) -> Tensor:
        """Return the sum of the squared norms of gradients on batches; see `LocalData.gradient_squares`."""
        self._check_covered("gradient_squares")
        v = self.open(v, "all")
        self.eval_mode()
        total = torch.zeros_like(self.size)
        for batch, _ in self.batches(1, None, 0, None):
            total += self.gradient(v, batch, "all").square().sum(-1, keepdim=True)
        return total

    def term_gradient(self, term: LossTerm, v: Tensor, *, steps: int | None = None, stream: int = 0) -> Tensor:
        """Return the gradient of the mean of the term alone; see `LocalData.term_gradient`."""
        v = self.open(v, "all")
        self.eval_mode()
        total = torch.zeros_like(v)
        if self.private is not None:
            check_term(term, type(self.algorithm).__name__)
            return self._private_term_gradient(self.private, v, total, term, steps, stream)
        for batch, _ in self.batches(1, steps, None if steps is None else stream, None, term):
            g = self.gradient(v, batch, "all", term, term_only=True)
            total.addcmul_(g, self.shares(batch) if steps is None else torch.full_like(self.size, 1 / steps))
        return total

    def _private_term_gradient(
        self, private: PrivateSteps, v: Tensor, total: Tensor, term: LossTerm, steps: int | None, stream: int
    ) -> Tensor:
        """Return the noised mean of the term's clipped gradients: over batches, or over all samples with noise once."""
        for batch, done in self.batches(1, steps, None if steps is None else stream, None, term):
            if steps is None:
                found = private.clipped_sum(v, batch, "all", None, term, term_only=True)
                total[: len(found)] += found
            else:
                total += self.private_gradient(private, v, batch, "all", None, term, done, term_only=True) / steps
        return private.noised(total) / self.size if steps is None else total

    def eval_mode(self) -> None:
        """Switch to eval mode, so that gradients have no side effects."""
        return

    @property
    def class_counts(self) -> Tensor:
        """Return the number of training samples of each class; see `LocalData.class_counts`."""
        rows = []
        for who in self.clients:
            y = self.federation.targets(torch.from_numpy(self.federation.train[who]))
            rows.append(torch.bincount(y, minlength=self.outputs).to(self.size))
        return torch.stack(rows) if self.size.ndim > 1 else rows[0]

    @abstractmethod
    def class_sums(self, v: Tensor, of: Callable[[Tensor], Tensor], *, at: str = HEAD) -> Tensor:
        """Sum over the samples of each class; see `LocalData.class_sums`."""

    def moments(self, v: Tensor, *, groups: int = 1, order: GroupOrder = "auto", of: DataSplit = "train") -> Moments:
        """Return the second moments of the inputs of the head; see `LocalData.moments`."""
        return self._problem(self.head_samples, v, groups, order, of).moments()

    def head_problem(
        self, v: Tensor, *, groups: int = 1, order: GroupOrder = "auto", of: DataSplit = "train"
    ) -> HeadProblem:
        """Return the task's loss as a function of the head's matrix; see `LocalData.head_problem`."""
        return self._problem(self._remembered, v, groups, order, of)

    def _problem(
        self, read: Callable[..., HeadSamples], v: Tensor, groups: int, order: GroupOrder, of: DataSplit
    ) -> HeadProblem:
        self._check_covered("head_problem")
        blocks = order == "blocks" or (order == "auto" and self.federation.chronological)

        def divided(who: int, client: HeadSamples) -> HeadSamples:
            if order == "stratified":
                return replace(client, groups=strata(client.y[: client.count], groups))
            dealt = groups_of(client.count, groups, blocks)
            near = purged_windows(self.federation.series, getattr(self.federation, of)[who], dealt) if blocks else None
            purged = None if near is None else [self.federation.index(rows) for rows in near]
            return replace(client, groups=dealt, purged=purged)

        each = [read(who, row, of) for who, row in zip(self.clients, self._rows(v), strict=True)]
        clients = [divided(who, client) for who, client in zip(self.clients, each, strict=True)]
        return HeadProblem(clients, self.size.ndim > 1, self.task.loss)

    def _rows(self, v: Tensor) -> Sequence[Tensor]:
        """Return one vector per client, as views."""
        return v.unbind() if self.size.ndim > 1 else (v,)

    def _remembered(self, who: int, v: Tensor, of: DataSplit) -> HeadSamples:
        """Return a client's samples as the head sees them, from memory if this body has read them in this round."""
        body = self.body_of(v)
        found = self.features.get(self.round, who, of, body) if len(body) else None
        if found is None:
            found = self.head_samples(who, v, of)
            if len(body):  # else the head reads the samples themselves
                self.features.put(who, of, body, found)
        return found

    def body_of(self, v: Tensor) -> Tensor:
        """Return all that features depend on, the data apart."""
        return self.space.body(v)

    def body_gradient(
        self,
        v: Tensor,
        objective: Callable[..., Tensor],
        *,
        groups: int = 1,
        order: GroupOrder = "auto",
        of: Sequence[DataSplit] = ("train",),
    ) -> Tensor:
        """Return the gradient of a function of the head's problems; see `LocalData.body_gradient`."""
        problems = [self.head_problem(v, groups=groups, order=order, of=split) for split in of]
        leaves = [client.features.requires_grad_() for problem in problems for client in problem.clients]
        with torch.enable_grad():
            value = objective(*problems).sum()
        adjoints = torch.autograd.grad(value, leaves, materialize_grads=True)
        total, found = torch.zeros_like(v), iter(adjoints)
        for split in of:
            for k, (who, row, own) in enumerate(zip(self.clients, self._rows(v), self._rows(total), strict=True)):
                own += self.pull_back(who, row, next(found), split)
                self.samples[k] += len(getattr(self.federation, split)[who])
        return total

    def own_samples(self, who: int, of: DataSplit) -> tuple[Tensor, Tensor, int]:
        """Return a client's inputs and targets, and how many; if there are none, one of others that does not count."""
        own = getattr(self.federation, of)[who]
        x, y = self.federation.gather(torch.from_numpy(own if len(own) else self.federation.train[who][:1]))
        return x, y, len(own)

    @property
    @abstractmethod
    def clients(self) -> Sequence[int]:
        """Return the clients whose data these are."""

    @abstractmethod
    def head_samples(self, who: int, v: Tensor, of: DataSplit) -> HeadSamples:
        """Return a client's samples as the head of v sees them, in no groups yet."""

    @abstractmethod
    def pull_back(self, who: int, v: Tensor, adjoint: Tensor, of: DataSplit) -> Tensor:
        """Return the derivatives at v of what has these derivatives with respect to the client's features."""

    @abstractmethod
    def shares(self, batch: Batch) -> Tensor:
        """Return the fraction of each client's samples that is in the batch, in the shape of `size`."""


def is_plain_sgd(algorithm: Algorithm) -> bool:
    """Tell whether steps neither remember nor clip: gradient and pull may then be applied one after the other."""
    return algorithm.optimizer == "sgd" and algorithm.momentum == 0 and algorithm.clip is None
