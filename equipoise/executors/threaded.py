"""The executor that trains one client per thread, for models whose operators are large."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

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
    algorithm_state,
)
from equipoise.executors.compiled_step import StepCompiler
from equipoise.executors.sample_scores import SampleScores, ScoreRecorder
from equipoise.executors.thread_trainer import ThreadTrainer
from equipoise.state import State
from equipoise.training.buffers import BUFFERS, without_buffers
from equipoise.training.replica import Replica
from equipoise.training.task import Task

_SCORE_BATCH = 512

T = TypeVar("T")


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
        inner: int = 1,
        compiled: bool = False,
    ):
        """Create the executor: `workers` clients at a time, each with `inner` threads inside its operators.

        With `compiled`, `prepare` compiles the steps; before that they are not compiled.
        """
        # A module that draws from torch's global random stream can be seeded only if no other thread draws from it.
        super().__init__(task, federation, algorithm, schedule, 1 if task.unseeded else workers)
        self.threads_before = torch.get_num_threads()
        self.inner, self.compiled = inner, compiled
        self.compiler: StepCompiler | None = None
        torch.set_num_threads(inner)
        self.local = threading.local()
        self.pool = ThreadPoolExecutor(self.workers, initializer=self._start_thread)

    def _start_thread(self) -> None:
        torch.set_num_threads(self.inner)
        self.local.replica = self.task.replica()
        self.local.compiled = {} if self.compiler is None else self.compiler.for_thread()

    def prepare(self, report: Callable[[str], None]) -> None:
        if self.compiled:
            start = self.task.start(len(self.federation), int(self.federation.train.lengths.sum()), self.seed)
            try:
                self.compiler = StepCompiler(self.task, self.federation, self.algorithm, start, report)
            except EquipoiseError:
                self.close()
                raise

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self.threads_before)

    def _each(
        self, function: Callable[..., T], items: Sequence[Any], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[T]:
        """Yield `function(item)` for each item in order, computed only a few items ahead so that memory stays small."""
        limit = 4 * self.workers
        waiting: list[Future[T]] = [self.pool.submit(function, item) for item in items[:limit]]
        for k in range(len(items)):
            if stopped():
                for future in waiting:
                    future.cancel()
                return
            result = waiting.pop(0).result()
            if k + limit < len(items):
                waiting.append(self.pool.submit(function, items[k + limit]))
            yield result

    def _work(self, round: int, job: ClientJob, purpose: str) -> ThreadTrainer:
        replica: Replica = self.local.replica
        replica.set_budget(job.budget)
        factor = self.rate_factor(round, purpose)
        trainer = ThreadTrainer(
            self.task, replica, self.federation, self.algorithm, self.seed, round, job.who, purpose, factor
        )
        trainer.compiled = self.local.compiled
        trainer.load_buffers(job.client, job.down)
        trainer.load_fixed_points(job.client)
        return trainer

    def train(self, round: int, jobs: Sequence[ClientJob], stopped: Callable[[], bool]) -> Iterator[ClientResult]:
        def local(job: ClientJob) -> ClientResult:
            began = time.perf_counter()
            trainer = self._work(round, job, TRAINING)
            trainer.replica.forget_solves()
            client, upload = self.algorithm.local_update(
                algorithm_state(job.client), without_buffers(job.down), trainer
            )
            if len(self.task.buffers):
                upload = trainer.with_buffers(upload, job.down)
                client = State(client, **{BUFFERS: trainer.own_buffers(client)})
            client = State(client, **trainer.fixed_points(job.client))
            finite = upload.wire.finite() and client.finite()
            seconds = time.perf_counter() - began
            samples = int(trainer.samples[0])
            return ClientResult(job.who, client, upload, samples, finite, trainer.replica.solves(), seconds)

        return self._each(local, jobs, stopped)

    def models(
        self, round: int, jobs: Sequence[ClientJob], kind: ModelKind
    ) -> Iterator[tuple[ClientModel | None, int]]:
        make, looks_up = self.maker(kind), self.looks_up(kind)

        def model(job: ClientJob) -> tuple[ClientModel | None, int]:
            trainer = self._work(round, job, "unseen" if kind == "unseen" else "adapt")
            vector = make(algorithm_state(job.client), without_buffers(job.down), trainer)
            if vector is None:
                return None, int(trainer.samples[0])
            found = ClientModel(job.who, vector, trainer.buffers_of(vector, job.client), looks_up)
            return found, int(trainer.samples[0])

        return self._each(model, jobs)

    def score(self, models: Sequence[ClientModel], indices: Sequence[np.ndarray]) -> Iterator[SampleScores]:
        return self._each(lambda pair: self._score(*pair), list(zip(models, indices, strict=True)))

    def score_one(self, vector: Tensor, indices: np.ndarray, buffers: Tensor | None = None) -> SampleScores:
        if not len(indices):
            return ScoreRecorder(self.task.loss, self.task.metrics, 0).scores()
        pieces = np.array_split(indices, max(1, -(-len(indices) // (8 * _SCORE_BATCH))))
        return SampleScores.concatenate(list(self.score([ClientModel(0, vector, buffers)] * len(pieces), pieces)))

    @torch.no_grad()
    def _score(self, model: ClientModel, indices: np.ndarray) -> SampleScores:
        replica: Replica = self.local.replica
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
