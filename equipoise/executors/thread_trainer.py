"""Local training of one client in a thread, on the thread's replica of the module."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from equipoise import randomness
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import DataSplit
from equipoise.data.federation import STREAMED_BYTES, Federation
from equipoise.equilibrium import WarmStart, auxiliary_loss
from equipoise.errors import EquipoiseError
from equipoise.executors.base import FIXED_POINTS, algorithm_state
from equipoise.executors.compiled_step import CompiledSteps
from equipoise.optimizers import Rate, as_number, move
from equipoise.parameter_space import Part
from equipoise.representations.head_problem import HeadSamples
from equipoise.representations.points import HEAD
from equipoise.representations.terms import BatchTerm, LossTerm
from equipoise.state import State, Upload
from equipoise.torch_device import is_accelerator
from equipoise.training.batches import ORDINARY, Batch, Draw
from equipoise.training.buffers import BUFFERS, BufferTracker
from equipoise.training.feature_memory import FeatureMemory
from equipoise.training.head_statistics import client_class_sums, head_samples, mean_loss, pull_back
from equipoise.training.local_trainer import LocalTrainer
from equipoise.training.replica import Replica
from equipoise.training.task import Task

_CHUNK_BYTES = 4 << 20  # samples are fetched some batches at a time, few enough to stay in the cache


class ThreadTrainer(LocalTrainer):
    """The data of one client, with a thread's replica of the module to train."""

    def __init__(
        self,
        task: Task,
        replica: Replica,
        federation: Federation,
        algorithm: Algorithm,
        seed: int,
        round: int,
        who: int,
        purpose: str,
        factor: float = 1.0,
    ):
        """Create the trainer of a client.

        Args:
            task: the task to train for.
            replica: the thread's copy of the model.
            federation: the clients and their data.
            algorithm: the algorithm, whose settings determine batches and steps.
            seed: seed of the run.
            round: number of the round.
            who: the client.
            purpose: what the training is for, part of the key of its random numbers.
            factor: factor of all learning rates.
        """
        self.task, self.replica, self.federation, self.algorithm = task, replica, federation, algorithm
        self.space, self.seed, self.round, self.factor = task.space, seed, round, factor
        self.key = (seed, round, federation.names[who], purpose)
        self.purpose = purpose
        self.who, self.indices = who, federation.train[who]
        self.size = task.w0.new_full((1,), len(self.indices))
        self.iterations = task.w0.new_full((1,), replica.iterations)
        self.samples = np.zeros(1, dtype=np.int64)
        self.tracker: BufferTracker | None = None
        "which buffers belong to which model, where statistics are averaged"
        self.features = FeatureMemory()
        self.compiled: CompiledSteps = {}
        "the steps that are compiled; all others run as they are"
        sample_bytes = max(1, federation.x[0].numel() * (federation.pixels or federation.x.dtype).itemsize)
        at_once = STREAMED_BYTES if is_accelerator(task.device) else _CHUNK_BYTES
        self.chunk = max(1, at_once // (sample_bytes * algorithm.batch))
        # Fixed points are remembered across all calls of `descend` on this trainer.
        self.warm = WarmStart(replica.module, len(self.indices)) if replica.equilibria else None

    def open(self, start: Tensor, part: Part, mask: Tensor | None = None) -> Tensor:
        """Load `start` into the replica, and make the gradients of the trained parameters views of one buffer."""
        low, high, _ = self.space.part(part).indices(self.space.size)
        buffer = torch.zeros_like(self.replica.vector)
        self.moving, self.gradients = self.replica.vector[low:high], buffer[low:high]
        for entry, parameter in zip(self.space.entries, self.replica.parameters, strict=True):
            moves = low <= entry.offset < high and (mask is None or bool(mask[entry.offset : entry.end].any()))
            parameter.requires_grad_(moves)
            parameter.grad = entry.view(buffer) if moves else None
        self.constrained = [
            layer for layer in self.replica.projected if any(p.requires_grad for p in layer.parameters())
        ]
        self._load(start)
        self.replica.module.train()
        return self.replica.vector

    def _load(self, v: Tensor) -> None:
        """Load a model, with the buffers that belong to it, into the replica."""
        self.replica.vector.copy_(v)
        if self.tracker is not None:
            self.replica.load_buffers(self.tracker.of(v))

    def close(self, v: Tensor) -> Tensor:
        result = v.clone()
        if self.tracker is not None:
            self.tracker.record(result, self.replica.read_buffers())
        return result

    def batches(
        self,
        epochs: int,
        steps: int | None,
        stream: int | None,
        active: Tensor | None,
        term: LossTerm | None = None,
        draw: Draw = ORDINARY,
    ) -> Iterator[tuple[Batch, Tensor | None]]:
        if active is not None and not bool(active):
            return
        seed, round, name, purpose = self.key
        self.replica.seed(randomness.key(seed, "dropout", purpose, round, name, -1 if stream is None else stream))
        self.begin_operation()
        batch = min(draw.size or self.algorithm.batch, len(self.indices))
        order = self.plan(0, len(self.indices), batch, epochs, steps, stream, draw)
        filled = order >= 0
        # The plan of all steps is copied at once to where the samples are.
        plan = self.federation.index(self.indices[order[filled]])
        ends = np.cumsum(filled.sum(1))
        for first in range(0, len(order), self.chunk):
            last = min(first + self.chunk, len(order))
            sizes = filled[first:last].sum(1).tolist()
            here = slice(int(ends[last - 1]) - sum(sizes), int(ends[last - 1]))
            x, y = self.federation.gather(plan[here], self.replica.batch_buffer)
            which = repeat(None)
            if self.warm is not None:
                which = torch.from_numpy(order[first:last][filled[first:last]]).split(sizes)
            # Probes do not change in training, so their representations are computed for many batches in one pass.
            probed = [h.split(sizes) for h in self._probed(term, x)]
            representations = zip(*probed, strict=True) if probed else repeat(())
            for xb, yb, rb, hb in zip(x.split(sizes), y.split(sizes), which, representations, strict=False):
                yield Batch(xb, yb, rows=rb, probed=hb), None

    @torch.no_grad()
    def _probed(self, term: LossTerm | None, x: Tensor) -> tuple[Tensor, ...]:
        """Return the representations that a term's probes make: without dropout, with the client's own buffers."""
        if term is None or not term.probes or self.private is not None:
            return ()
        module, hook = self.replica.module, self.replica.hook(term.at)
        training = module.training
        module.eval()
        found: tuple[Tensor, ...] = ()
        for probe in term.probes:
            self.task.predict(partial(functional_call, module, self.space.views(probe)), x)
            found += hook.take()
        module.train(training)
        return found

    def eval_mode(self) -> None:
        self.replica.module.eval()

    @property
    def clients(self) -> Sequence[int]:
        return (self.who,)

    def head_samples(self, who: int, v: Tensor, of: DataSplit) -> HeadSamples:
        self._load(v)
        self.eval_mode()
        module = self.replica.module
        return head_samples(self.task, module, module, *self.own_samples(who, of))

    def body_of(self, v: Tensor) -> Tensor:
        buffers = self.replica.read_buffers() if self.tracker is None else self.tracker.of(v)
        return torch.cat([self.space.body(v), buffers])

    def pull_back(self, who: int, v: Tensor, adjoint: Tensor, of: DataSplit) -> Tensor:
        self.open(v, "body")
        self.eval_mode()
        x, y, _ = self.own_samples(who, of)
        module = self.replica.module
        for features, bars in pull_back(self.task, module, module, x, y, adjoint):
            features.backward(bars)
        return self.space.join(self.gradients, torch.zeros_like(self.space.head(v)))

    def shares(self, batch: Batch) -> Tensor:
        return len(batch.y) / self.size

    def loss(self, v: Tensor, *, of: DataSplit = "train") -> Tensor:
        self._check_covered("loss")
        self._load(v)
        self.eval_mode()
        x, y, count = self.own_samples(self.who, of)
        return mean_loss(self.task, self.replica.module, x, y) if count else torch.zeros_like(self.size)

    def class_sums(self, v: Tensor, of: Callable[[Tensor], Tensor], *, at: str = HEAD) -> Tensor:
        self._check_covered("class_sums")
        self._load(v)
        self.eval_mode()
        x, y = self.federation.gather(torch.from_numpy(self.indices))
        return client_class_sums(self.task, self.replica.module, self.replica.module, x, y, of, at)

    def gradient(
        self, v: Tensor, batch: Batch, part: Part, term: LossTerm | None = None, term_only: bool = False
    ) -> Tensor:
        compiled = self.compiled.get(("gradient", part))
        if compiled is not None and term is None and self.replica.module.training and compiled.fits(batch):
            compiled.gradient(v, batch, self.gradients)
            return self.gradients
        self.gradients.zero_()
        try:
            self._loss(batch, term, term_only).backward()
        except (RuntimeError, ValueError, IndexError) as error:
            raise EquipoiseError(
                f"the model or its loss fails on a batch of {len(batch.x)} samples: {error}"
            ) from error
        return self.gradients

    def _loss(self, batch: Batch, term: LossTerm | None, term_only: bool) -> Tensor:
        if self.warm is None:
            return self._value(batch, term, term_only)
        assert batch.rows is not None
        with self.warm.at(batch.rows):
            return self._value(batch, term, term_only)

    def _value(self, batch: Batch, term: LossTerm | None, term_only: bool) -> Tensor:
        hook = None if term is None else self.replica.hook(term.at)
        output = self.task.predict(self.replica.module, batch.x)
        auxiliary = auxiliary_loss(self.replica.auxiliary)
        value = None
        if term is not None and hook is not None:
            value = self._term(term, hook.take(), batch)
            if term_only:
                return value
        loss = self.task.batch_loss(output, batch.y)
        loss = loss if value is None else value + loss
        return loss if auxiliary is None else loss + auxiliary

    @staticmethod
    def _term(term: LossTerm, h: tuple[Tensor, ...], batch: Batch) -> Tensor:
        if not isinstance(term, BatchTerm):
            return term.each(h, batch.probed, batch.y, term.given).mean()
        weights = h[0].new_full((len(h[0]),), 1 / len(h[0]))
        return term.whole(h, batch.probed, batch.y, weights, term.given)

    def constrain(self) -> None:
        if self.constrained:
            with torch.no_grad():
                for layer in self.constrained:
                    layer.project_()

    def constrained_model(self, v: Tensor) -> Tensor:
        if not self.constrained:
            return v
        self.replica.vector.copy_(v)
        self.constrain()
        return self.replica.vector.clone()

    def statistics_of(self, v: Tensor) -> Tensor | None:
        return None if self.tracker is None else self.tracker.of(v)

    def load_statistics(self, statistics: Tensor) -> None:
        self.replica.load_buffers(statistics)

    def read_statistics(self) -> Tensor | None:
        return None if self.tracker is None else self.replica.read_buffers()

    def record_statistics(self, v: Tensor, statistics: Tensor) -> None:
        assert self.tracker is not None
        self.tracker.record(v, statistics)

    def load_buffers(self, client: State, down: State) -> None:
        """Load the client's buffers; where statistics are averaged, keep track of what belongs to which model."""
        if not len(self.task.buffers):
            return
        own = client.get(BUFFERS, self.task.buffers)
        self.replica.load_buffers(own)
        if BUFFERS in down:
            shared = self.task.buffer_layout.merged(down[BUFFERS], own)
            self.tracker = BufferTracker(shared, own, algorithm_state(client))

    def buffers_of(self, vector: Tensor, client: State) -> Tensor | None:
        """Return the buffers that belong to a model that was made with this trainer."""
        if self.tracker is not None:
            return self.tracker.of(vector)
        trained = len(self.task.buffers) and self.samples[0]
        return self.replica.read_buffers() if trained else client.get(BUFFERS)

    def own_buffers(self, client: State) -> Tensor:
        """Return the buffers to keep with the client's new state."""
        return self.replica.read_buffers() if self.tracker is None else self.tracker.of_state(client)

    def with_buffers(self, upload: Upload, down: State) -> Upload:
        """Return the upload with the buffers of the model that it is made of, where statistics are averaged."""
        if self.tracker is None:
            return upload
        sent = self.task.buffer_layout.shared(self.tracker.of_state(upload.message))
        known = None if upload.reference is None else State(upload.reference, **{BUFFERS: down[BUFFERS]})
        return Upload(State(upload.message, **{BUFFERS: sent}), known, upload.weight)

    def load_fixed_points(self, client: State) -> None:
        """Load the fixed points that were saved with the client's state, if any were."""
        if self.warm is not None:
            kept = [name for name in client if name.startswith(FIXED_POINTS)]
            self.warm.load({name.removeprefix(FIXED_POINTS): client[name] for name in kept})

    def fixed_points(self, client: State) -> State:
        """Return the fixed points to save with the client's state, in tables as long as those already in it."""
        kept = State()
        for name, found in self.warm.tensors("client").items() if self.warm is not None else ():
            table = client.get(FIXED_POINTS + name, found)
            kept[FIXED_POINTS + name] = torch.cat([found, table[len(found) :]])
        return kept

    def rate(self, lr: Rate | None) -> Rate:
        return as_number(super().rate(lr))

    @property
    def local_steps(self) -> Tensor:
        return self.task.w0.new_full((1,), self.steps_of(len(self.indices)))

    @property
    def iterations_performed(self) -> Tensor:
        return self.task.w0.new_full((1,), self.replica.iterations_performed)

    def step(self, v: Tensor, batch: Batch, part: Part, lr: Rate, term: LossTerm | None = None) -> None:
        compiled = self.compiled.get(("step", part))
        if compiled is not None and term is None and compiled.fits(batch):
            compiled.step(v, batch, lr)
        else:
            move(self.moving, self.gradient(v, batch, part, term), lr)
