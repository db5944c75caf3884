"""The executor that trains one client per thread, for models whose operators are large."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
    algorithm_state,
)
from equipoise.executors.compiled_step import CompiledSteps, StepCompiler
from equipoise.executors.sample_scores import SampleScores, ScoreRecorder
from equipoise.executors.thread_pool import ThreadPool
from equipoise.executors.thread_trainer import ThreadTrainer
from equipoise.state import State
from equipoise.training.buffers import BUFFERS, without_buffers
from equipoise.training.replica import Replica
from equipoise.training.sample_gradients import SampleGradients
from equipoise.training.task import Task

_SCORE_BATCH = 512


class _Own(NamedTuple):
    """What a thread works with."""

    replica: Replica
    compiled: CompiledSteps
    gradients: SampleGradients


class ThreadedExecutor(Executor):
    """Trains one client per thread."""

    mode: ClassVar[str] = "threads"

    def __init__(
        self,
        task: Task,
        federation: Federation,
        algorithm: Algorithm,
        schedule: Schedule,
        workers: int,
        shards: ClientShards,
        inner: int = 1,
        compiled: bool = False,
    ):
        """Create the executor: `workers` clients at a time, each with `inner` threads inside its operators.

        With `compiled`, `prepare` compiles the steps; before that they are not compiled.
        """
        # A module that draws from torch's global random stream can be seeded only if no other thread draws from it.
        super().__init__(task, federation, algorithm, schedule, 1 if task.unseeded else workers, shards)
        self.compiled = compiled
        self.compiler: StepCompiler | None = None
        self.pool = ThreadPool(self.workers, self._make, inner)

    def _make(self) -> "_Own":
        compiled = {} if self.compiler is None else self.compiler.for_thread()
        return _Own(self.task.replica(), compiled, SampleGradients(self.task))

    def prepare(self, report: Callable[[str], None]) -> None:
        if self.compiled:
            start = self.task.start(len(self.federation), int(self.federation.train.lengths.sum()), self.seed)
            try:
                self.compiler = StepCompiler(self.task, self.federation, self.algorithm, start, report)
            except EquipoiseError:
                self.close()
                raise

    def close(self) -> None:
        self.pool.close()
        super().close()

    def _work(self, own: _Own, round: int, job: ClientJob, purpose: str) -> ThreadTrainer:
        own.replica.set_budget(job.budget)
        factor = self.rate_factor(round, purpose)
        trainer = ThreadTrainer(
            self.task, own.replica, self.federation, self.algorithm, self.seed, round, job.who, purpose, factor
        )
        trainer.compiled, trainer.features = own.compiled, self.features
        trainer.private = self.private_steps(own.gradients, [job.who], round, purpose)
        trainer.load_buffers(job.client, job.down)
        trainer.load_fixed_points(job.client)
        return trainer

    def train(self, round: int, jobs: Sequence[ClientJob], stopped: Callable[[], bool]) -> Iterator[ClientResult]:
        def local(own: _Own, job: ClientJob) -> ClientResult:
            began = time.perf_counter()
            job = job.on(self.task.device)
            trainer = self._work(own, round, job, TRAINING)
            own.replica.forget_solves()
            client, upload = self.algorithm.local_update(
                algorithm_state(job.client), without_buffers(job.down), trainer
            )
            diagnostics = self.diagnostics(client, job.down)
            if len(self.task.buffers):
                upload = trainer.with_buffers(upload, job.down)
                client = State(client, **{BUFFERS: trainer.own_buffers(client)})
            client = State(client, **trainer.fixed_points(job.client))
            finite = upload.wire.finite() and client.finite()
            seconds = time.perf_counter() - began
            samples = int(trainer.samples[0])
            solves = own.replica.solves()
            found = diagnostics[0] if diagnostics else {}
            return ClientResult(job.who, client, upload, samples, finite, solves, seconds, found)

        return self.pool.each(local, jobs, stopped)

    def models(
        self, round: int, jobs: Sequence[ClientJob], kind: ModelKind
    ) -> Iterator[tuple[ClientModel | None, int]]:
        make, looks_up = self.maker(kind), self.looks_up(kind)

        def model(own: _Own, job: ClientJob) -> tuple[ClientModel | None, int]:
            job = job.on(self.task.device)
            trainer = self._work(own, round, job, "unseen" if kind == "unseen" else "adapt")
            vector = make(algorithm_state(job.client), without_buffers(job.down), trainer)
            if vector is None:
                return None, int(trainer.samples[0])
            found = ClientModel(job.who, vector, trainer.buffers_of(vector, job.client), looks_up)
            return found, int(trainer.samples[0])

        return self.pool.each(model, jobs)

    def score(self, models: Sequence[ClientModel], indices: Sequence[np.ndarray]) -> Iterator[SampleScores]:
        return self.pool.each(self._score, list(zip(models, indices, strict=True)))

    def score_pieces(
        self, vector: Tensor, pieces: Sequence[np.ndarray], buffers: Tensor | None = None
    ) -> Iterator[SampleScores]:
        return self.score([ClientModel(0, vector, buffers)] * len(pieces), pieces)

    @torch.no_grad()
    def _score(self, own: _Own, given: tuple[ClientModel, np.ndarray]) -> SampleScores:
        replica, (model, indices) = own.replica, given
        replica.set_budget(None)  # the iteration limit applies to training only
        replica.vector.copy_(model.vector)
        if len(self.task.buffers):
            replica.load_buffers(self.task.buffers if model.buffers is None else model.buffers)
        module = replica.module.eval()
        if model.looks_up:
            module = self.predictor(module, model.who)
        scores = ScoreRecorder(self.task.loss, self.task.metrics, len(indices))
        for first in range(0, len(indices), _SCORE_BATCH):
            rows = slice(first, first + _SCORE_BATCH)
            x, y = self.federation.gather(torch.from_numpy(indices[rows]), replica.batch_buffer)
            scores.add(first, self.task.predict(module, x), y)
        return scores.scores()
