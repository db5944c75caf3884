"""The executor that trains many clients in one call: their vectors are stacked and every operator is batched.

The gradient of a whole stack is traced once into a plain list of tensor operations, so that a step has no overhead of
autograd or vmap; `compiled` passes that list to torch.compile.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from equipoise.algorithms.base import Algorithm
from equipoise.config.engine import Schedule
from equipoise.data.federation import Federation
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
from equipoise.executors.stacked_trainer import StackedTrainer
from equipoise.executors.traced_gradient import StackedModule
from equipoise.state import stack
from equipoise.training.task import Task

_GROUP = 20  # clients per stack: enough to spread the cost of a call, few enough for the cache
_SCORE_BATCH = 256


def groups(items: Sequence[int], limit: int = _GROUP) -> list[list[int]]:
    """Split items into as few groups of even size as the limit allows; the split depends on their number only."""
    return [part.tolist() for part in np.array_split(np.array(items, dtype=np.int64), -(-len(items) // limit))]


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
        compiled: bool = False,
    ):
        """Create the executor; `compiled` compiles the gradient with torch.compile, the rest is as in `Executor`."""
        super().__init__(task, federation, algorithm, schedule, workers)
        if (why := task.why_not_stacked) is not None:
            raise EquipoiseError(f"engine.mode = 'stacked' is not possible here, because {why}; use 'threads'")
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(workers)
        self.module = StackedModule(task, compiled)

    def close(self) -> None:
        torch.set_num_threads(self.threads_before)

    def _groups(self, jobs: Sequence[ClientJob]) -> list[list[ClientJob]]:
        """Group jobs whose clients take about the same number of steps, so that few of them wait for others."""
        if not jobs:
            return []
        lengths = self.federation.train.lengths
        order = sorted(range(len(jobs)), key=lambda k: (-lengths[jobs[k].who], self.federation.names[jobs[k].who]))
        return [[jobs[order[k]] for k in group] for group in groups(range(len(jobs)))]

    def _cohort(self, round: int, group: list[ClientJob], purpose: str) -> StackedTrainer:
        who = [job.who for job in group]
        factor = self.rate_factor(round, purpose)
        return StackedTrainer(self.module, self.federation, self.algorithm, self.seed, round, who, purpose, factor)

    def train(self, round: int, jobs: Sequence[ClientJob], stopped: Callable[[], bool]) -> Iterator[ClientResult]:
        done: dict[int, ClientResult] = {}
        for group in self._groups(jobs):
            if stopped():
                break
            trainer = self._cohort(round, group, TRAINING)
            with torch.no_grad():
                client, upload = self.algorithm.local_update(
                    stack_states([job.held for job in group]), stack([job.down for job in group]), trainer
                )
            all_finite = client.finite() and upload.wire.finite()
            for k, job in enumerate(group):
                sent = upload.row(k)
                finite = all_finite or (client.row(k).finite() and sent.wire.finite())
                done[job.who] = ClientResult(job.who, StackRow(client, k), sent, int(trainer.samples[k]), finite)
        yield from (done[job.who] for job in jobs if job.who in done)

    @torch.no_grad()
    def models(
        self, round: int, jobs: Sequence[ClientJob], kind: ModelKind
    ) -> Iterator[tuple[ClientModel | None, int]]:
        make, looks_up = self.maker(kind), self.looks_up(kind)
        found: dict[int, tuple[ClientModel | None, int]] = {}
        for group in self._groups(jobs):
            trainer = self._cohort(round, group, "unseen" if kind == "unseen" else "adapt")
            clients, downs = stack_states([job.held for job in group]), stack([job.down for job in group])
            vectors = make(clients, downs, trainer)
            for k, job in enumerate(group):
                model = None if vectors is None else ClientModel(job.who, vectors[k], looks_up=looks_up)
                found[job.who] = model, int(trainer.samples[k])
        yield from (found[job.who] for job in jobs)

    @torch.no_grad()
    def score(self, models: Sequence[ClientModel], indices: Sequence[np.ndarray]) -> Iterator[SampleScores]:
        loss, metrics = self.task.loss, self.task.metrics
        scores = [ScoreRecorder(loss, metrics, len(own)) for own in indices]
        for k, model in enumerate(models):
            if model.looks_up and len(indices[k]):  # it depends on its client's samples, so it is not stacked
                module = self.predictor(self.task.to_module(model.vector), model.who)
                self._score_in_pieces(partial(self.task.predict, module), indices[k], scores[k])
        stacks = [k for k, model in enumerate(models) if not model.looks_up]
        order = sorted(stacks, key=lambda k: (-len(indices[k]), self.federation.names[models[k].who]))
        for group in groups(order) if order else []:
            views = self.task.space.views(torch.stack([models[k].vector for k in group]))
            for first in range(0, max(len(indices[k]) for k in group), _SCORE_BATCH):
                rows = [indices[k][first : first + _SCORE_BATCH] for k in group]
                width = max(len(row) for row in rows)
                padded = np.zeros((len(group), width), dtype=np.int64)
                for k, row in enumerate(rows):
                    padded[k, : len(row)] = row
                x, y = self.federation.gather(torch.from_numpy(padded.reshape(-1)))
                outputs = vmap(self._forward)(views, x.unflatten(0, padded.shape)).flatten(0, 1)
                batch = ScoreRecorder(loss, metrics, len(y))
                batch.add(0, outputs, y)
                for k, row in enumerate(rows):
                    scores[group[k]].copy(first, batch, slice(k * width, k * width + len(row)))
        yield from (each.scores() for each in scores)

    @torch.no_grad()
    def score_one(self, vector: Tensor, indices: np.ndarray, buffers: Tensor | None = None) -> SampleScores:
        scores = ScoreRecorder(self.task.loss, self.task.metrics, len(indices))
        if len(indices):
            views = self.task.space.views(vector)
            self._score_in_pieces(partial(self._forward, views), indices, scores)
        return scores.scores()

    def _forward(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.task.predict(partial(functional_call, self.module.scoring, parameters), x)

    def _score_in_pieces(self, predict: Callable[[Tensor], Tensor], indices: np.ndarray, scores: ScoreRecorder) -> None:
        first = 0
        for piece in np.array_split(indices, max(1, -(-len(indices) // 4096))):
            x, y = self.federation.gather(torch.from_numpy(piece))
            scores.add(first, predict(x), y)
            first += len(piece)
