"""The executor that trains many clients in one call: their vectors are stacked and every operator is batched.

The gradient of a whole stack is traced once into a plain list of tensor operations, so that a step has no overhead of
autograd or vmap; `compiled` compiles that list. There is one stack per thread at a time. The last digits of a
client's results depend on its place in its stack, so stacks are formed of the clients of a shard, in the same way
whatever the number of threads and processes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from equipoise.algorithms.base import Algorithm
from equipoise.config.engine import Schedule
from equipoise.data.federation import Federation
from equipoise.distributed.shards import ClientShards
from equipoise.errors import EquipoiseError
from equipoise.executors.base import (
    TRAINING,
    ClientJob,
    ClientModel,
    ClientResult,
    Executor,
    ModelKind,
    StackRow,
    stack_states,
)
from equipoise.executors.sample_scores import SampleScores, ScoreRecorder
from equipoise.executors.stacked_trainer import StackedTrainer, StackWorker
from equipoise.executors.thread_pool import ThreadPool
from equipoise.executors.traced_gradient import StackedModule
from equipoise.state import stack
from equipoise.training.task import Task

_SCORE_BATCH = 256

T = TypeVar("T")


class StackedExecutor(Executor):
    """Trains one stack of clients per call."""

    mode: ClassVar[str] = "stacked"

    def __init__(
        self,
        task: Task,
        federation: Federation,
        algorithm: Algorithm,
        schedule: Schedule,
        workers: int,
        shards: ClientShards,
        size: int,
        compiled: bool = False,
    ):
        """Create the executor.

        Args:
            task: the task to train for.
            federation: the clients and their data.
            algorithm: the algorithm whose hooks are called.
            schedule: the schedule of the run, with its seed.
            workers: number of threads.
            shards: the division of the clients; a stack has clients of one shard.
            size: largest number of clients in a stack.
            compiled: whether to compile the gradient, which takes long and is then faster for the smallest models.
        """
        super().__init__(task, federation, algorithm, schedule, workers, shards)
        if (why := task.why_not_stacked) is not None:
            raise EquipoiseError(f"engine.mode = 'stacked' is not possible here, because {why}; use 'threads'")
        self.size, self.module = size, StackedModule(task, compiled)
        self.pool = ThreadPool(workers, lambda: StackWorker(self.module))

    def close(self) -> None:
        self.pool.close()
        super().close()

    def stacks(self, items: Iterable[T], who: Callable[[T], int], length: Callable[[T], int]) -> list[list[T]]:
        """Divide what belongs to clients into stacks of even size: first by shard, then by length.

        Clients of about the same length are stacked, so that few of them wait for others.

        Args:
            items: the items to divide, at most one per client.
            who: returns the client of an item.
            length: returns the number of samples of an item.
        """
        found: list[list[T]] = []
        for part in self.shards.group(items, lambda item: self.federation.numbers[who(item)]).values():
            part.sort(key=lambda item: (-length(item), self.federation.names[who(item)]))
            count = -(-len(part) // self.size)
            ends = [k * len(part) // count for k in range(count + 1)]
            found += [part[first:end] for first, end in pairwise(ends)]
        return found

    def _stacks_of_jobs(self, jobs: Sequence[ClientJob]) -> list[list[ClientJob]]:
        lengths = self.federation.train.lengths
        return self.stacks(jobs, lambda job: job.who, lambda job: int(lengths[job.who]))

    def _trainer(self, worker: StackWorker, round: int, group: list[ClientJob], purpose: str) -> StackedTrainer:
        who = [job.who for job in group]
        factor = self.rate_factor(round, purpose)
        trainer = StackedTrainer(worker, self.federation, self.algorithm, self.seed, round, who, purpose, factor)
        trainer.features = self.features
        trainer.private = self.private_steps(worker.gradients, who, round, purpose)
        return trainer

    def train(self, round: int, jobs: Sequence[ClientJob], stopped: Callable[[], bool]) -> Iterator[ClientResult]:
        @torch.no_grad()
        def local(worker: StackWorker, group: list[ClientJob]) -> list[ClientResult]:
            trainer = self._trainer(worker, round, group, TRAINING)
            client, upload = self.algorithm.local_update(
                stack_states([job.held for job in group], self.task.device), stack([job.down for job in group]), trainer
            )
            diagnostics = self.diagnostics(client, stack([job.down for job in group]))
            all_finite = client.finite() and upload.wire.finite()
            results = []
            for k, job in enumerate(group):
                sent = upload.row(k)
                finite = all_finite or (client.row(k).finite() and sent.wire.finite())
                found = diagnostics[k] if diagnostics else {}
                samples = int(trainer.samples[k])
                results.append(ClientResult(job.who, StackRow(client, k), sent, samples, finite, diagnostics=found))
            return results

        found = self.pool.each(local, self._stacks_of_jobs(jobs), stopped)
        done = {result.who: result for results in found for result in results}
        yield from (done[job.who] for job in jobs if job.who in done)

    def models(
        self, round: int, jobs: Sequence[ClientJob], kind: ModelKind
    ) -> Iterator[tuple[ClientModel | None, int]]:
        make, looks_up = self.maker(kind), self.looks_up(kind)

        @torch.no_grad()
        def model(worker: StackWorker, group: list[ClientJob]) -> dict[int, tuple[ClientModel | None, int]]:
            trainer = self._trainer(worker, round, group, "unseen" if kind == "unseen" else "adapt")
            clients = stack_states([job.held for job in group], self.task.device)
            vectors = make(clients, stack([job.down for job in group]), trainer)
            made = {}
            for k, job in enumerate(group):
                one = None if vectors is None else ClientModel(job.who, vectors[k], looks_up=looks_up)
                made[job.who] = one, int(trainer.samples[k])
            return made

        found: dict[int, tuple[ClientModel | None, int]] = {}
        for made in self.pool.each(model, self._stacks_of_jobs(jobs)):
            found |= made
        yield from (found[job.who] for job in jobs)

    def score(self, models: Sequence[ClientModel], indices: Sequence[np.ndarray]) -> Iterator[SampleScores]:
        each = range(len(models))
        groups = self.stacks(
            (k for k in each if not models[k].looks_up), lambda k: models[k].who, lambda k: len(indices[k])
        )
        # A model that looks up its client's samples is different from those of other clients, so it is not stacked.
        groups += [[k] for k in each if models[k].looks_up]

        def score(worker: StackWorker, group: list[int]) -> list[SampleScores]:
            some = [models[k] for k in group]
            found = self._score_own if some[0].looks_up else self._score_stack
            return found(worker, some, [indices[k] for k in group])

        found = self.pool.each(score, groups)
        done = {
            k: scores
            for group, found_ in zip(groups, found, strict=True)
            for k, scores in zip(group, found_, strict=True)
        }
        yield from (done[k] for k in each)

    @torch.no_grad()
    def _score_stack(
        self, worker: StackWorker, models: list[ClientModel], indices: list[np.ndarray]
    ) -> list[SampleScores]:
        """Score models, each on its own samples, in one call per batch."""
        loss, metrics = self.task.loss, self.task.metrics
        scores = [ScoreRecorder(loss, metrics, len(own)) for own in indices]
        views = self.task.space.views(torch.stack([model.vector for model in models]))
        firsts = range(0, max(map(len, indices)), _SCORE_BATCH)
        batches = [[own[first : first + _SCORE_BATCH] for own in indices] for first in firsts]
        widths = [max(map(len, rows)) for rows in batches]
        together, begin = ScoreRecorder(loss, metrics, len(models) * sum(widths)), 0
        for rows, width in zip(batches, widths, strict=True):
            padded = np.zeros((len(rows), width), dtype=np.int64)
            for k, row in enumerate(rows):
                padded[k, : len(row)] = row
            x, y = self.federation.gather(torch.from_numpy(padded.reshape(-1)), worker.memory)
            outputs = vmap(partial(self._forward, worker))(views, x.unflatten(0, padded.shape)).flatten(0, 1)
            together.add(begin, outputs, y)
            begin += len(y)
        begin = 0
        for first, rows, width in zip(firsts, batches, widths, strict=True):
            for k, row in enumerate(rows):
                scores[k].copy(first, together, slice(begin + k * width, begin + k * width + len(row)))
            begin += len(rows) * width
        return [each.scores() for each in scores]

    @torch.no_grad()
    def _score_own(
        self, worker: StackWorker, models: list[ClientModel], indices: list[np.ndarray]
    ) -> list[SampleScores]:
        """Score a model that looks up its client's samples."""
        (model,), (own,) = models, indices
        if not len(own):
            return [self._score_piece(worker, self.task.module, own)]
        module = self.predictor(self.task.to_module(model.vector, device=self.task.device), model.who)
        return [self._score_piece(worker, module, own)]

    def score_pieces(
        self, vector: Tensor, pieces: Sequence[np.ndarray], buffers: Tensor | None = None
    ) -> Iterator[SampleScores]:
        views = self.task.space.views(vector)

        def score(worker: StackWorker, piece: np.ndarray) -> SampleScores:
            return self._score_piece(worker, partial(functional_call, worker.scoring, views), piece)

        return self.pool.each(score, pieces)

    @torch.no_grad()
    def _score_piece(self, worker: StackWorker, module: Callable[..., Tensor], indices: np.ndarray) -> SampleScores:
        scores = ScoreRecorder(self.task.loss, self.task.metrics, len(indices))
        for first in range(0, len(indices), _SCORE_BATCH):
            x, y = self.federation.gather(torch.from_numpy(indices[first : first + _SCORE_BATCH]), worker.memory)
            scores.add(first, self.task.predict(module, x), y)
        return scores.scores()

    def _forward(self, worker: StackWorker, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.task.predict(partial(functional_call, worker.scoring, parameters), x)
