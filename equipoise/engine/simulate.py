"""The simulator: every round of a federation, in this process."""

import threading
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from equipoise import files, randomness, reduce
from equipoise.algorithm import Algorithm, Start, announce
from equipoise.data.federation import Federation
from equipoise.engine.checkpoint import Checkpoints
from equipoise.engine.executor import BUFFERS, Done, Job
from equipoise.engine.interrupt import listening
from equipoise.engine.options import Engine, Schedule
from equipoise.engine.store import ClientStore
from equipoise.errors import EquipoiseError, Interrupted, RunFailed
from equipoise.losses import LOSSES
from equipoise.memory import peak_memory_mb
from equipoise.runfolder import RunFolder
from equipoise.scores import Scores
from equipoise.state import State, Uploads
from equipoise.task import Task
from equipoise.watcher import Watcher


@dataclass
class Counters:
    bytes_up: int = 0
    bytes_down: int = 0
    gradient_samples: int = 0
    left_out: int = 0
    seconds: float = 0.0


class Simulation:
    """A run: the server's state, the clients' and what has been counted so far."""

    def __init__(
        self,
        task: Task,
        federation: Federation,
        algorithm: Algorithm,
        schedule: Schedule,
        engine: Engine,
        folder: RunFolder | None = None,
        watcher: Watcher | None = None,
    ):
        self.task, self.algorithm, self.schedule, self.engine = task, algorithm, schedule, engine
        self.federation = federation.prepared(task.dtype, task.channels_last)
        self.folder, self.watcher = folder, watcher or Watcher()
        classes = federation.classes or 0
        if task.loss is LOSSES["cross-entropy"] and task.outputs < classes:
            raise EquipoiseError(
                f"there is a label {classes - 1}, and the model has only {task.outputs} outputs; it needs {classes}"
            )
        if not federation.x.is_floating_point():
            task.check_symbols(federation.x)
        self.training, _ = federation.by_name
        self.start = Start(task.space, task.w0, len(self.training))
        self.announced = announce(algorithm, self.start)
        self.cohort = schedule.cohort(len(self.training))
        self.server = algorithm.server(self.start)
        initial = algorithm.client(self.start)
        if len(task.buffers):
            initial = State(initial, **{BUFFERS: task.buffers})
        states = None if folder is None else folder.checkpoint
        self.store = ClientStore(len(federation), initial, states, engine.memory_mb << 20)
        self.checkpoints = None if folder is None else Checkpoints(folder.checkpoint)
        self.counters = Counters()
        self.done = 0
        self.lines: list[dict[str, Any]] = []
        self.interrupted = threading.Event()
        self.executor = engine.executor(task, self.federation, algorithm, schedule.seed)
        self.scores = Scores(self.federation, algorithm, self.executor)

    @cached_property
    def fingerprint(self) -> str:
        """Stands for all that a run begins with and its settings do not say."""
        start = blake2b(self.task.w0.numpy().tobytes(), digest_size=8).hexdigest()
        return f"{self.federation.fingerprint(splits=True)} {self.task.space.fingerprint()} {start}"

    @property
    def mode(self) -> str:
        return type(self.executor).__name__.lower()

    def close(self) -> None:
        self.executor.close()

    def sample(self, round: int) -> list[int]:
        """Who takes part, drawn from the training clients in the order of their names."""
        rng = randomness.generator(self.schedule.seed, "participation", round)
        ranks = rng.choice(len(self.training), self.cohort, replace=False)
        return [self.training[rank] for rank in np.sort(ranks)]

    def run(self) -> None:
        """All rounds that are left."""
        self.watcher.begin(self.schedule.rounds, self.done)
        try:
            with listening(self.interrupted):
                while self.done < self.schedule.rounds:
                    if not self.advance():
                        break
        finally:
            self.close()
        if self.interrupted.is_set() and self.done < self.schedule.rounds:
            self._save()
            raise Interrupted
        self._finish()

    def advance(self) -> bool:
        """One more round, or False if it was broken off; then nothing has changed."""
        round = self.done + 1
        began = time.perf_counter()
        jobs = [Job(who, self.store.get(who), self.algorithm.down(self.server, who)) for who in self.sample(round)]
        results = list(self.executor.train(round, jobs, self.interrupted.is_set))
        if self.interrupted.is_set():
            return False
        accepted = self._accept(round, jobs, results)
        uploads = Uploads(tuple(r.who for r in accepted), tuple(r.upload for r in accepted))
        server = self.algorithm.aggregate(self.server, uploads, reduce.mean)
        if not server.finite():
            raise RunFailed(self._hopeless(round, "the server's new state has NaN or infinite numbers"))
        self.server = server
        for result in accepted:
            self.store.put(result.who, result.client)
        self.done = round
        trained = time.perf_counter()
        line: dict[str, Any] = {"round": round, "clients": len(jobs), "left_out": len(jobs) - len(accepted)}
        if round % self.schedule.evaluate_every == 0 or round == self.schedule.rounds:
            self.scores.training(round, self.server, self.store)
            line |= self.scores.training.summary()
        self.scores.adapt(round, self.server, self.store, last=round == self.schedule.rounds)
        line |= {k: v for k, v in asdict(self.counters).items() if k in ("bytes_up", "bytes_down", "gradient_samples")}
        self.counters.seconds += time.perf_counter() - began
        self._log(line, {"round": round, "train": trained - began, "evaluate": time.perf_counter() - trained})
        if round % self.schedule.checkpoint_every == 0 or round == self.schedule.rounds:
            self._save()
        return True

    def _accept(self, round: int, jobs: list[Job], results: list[Done]) -> list[Done]:
        """The results that can be used. A client whose update is left out keeps its old state."""
        for job in jobs:
            self.counters.bytes_down += job.down.nbytes
        accepted = []
        for result in results:
            wire = result.upload.wire
            if wire.shapes() != self.announced.up:
                raise TypeError(f"{type(self.algorithm).__name__} announced {self.announced.up}, sent {wire.shapes()}")
            self.counters.bytes_up += wire.nbytes
            self.counters.gradient_samples += result.gradient_samples
            if wire.finite() and result.client.finite():
                accepted.append(result)
                continue
            self.counters.left_out += 1
            name = self.federation.names[result.who]
            self.watcher.tell(f"round {round}: the update of {name} has NaN or infinite numbers and was left out")
        if not accepted:
            raise RunFailed(self._hopeless(round, "every client's update has NaN or infinite numbers"))
        return accepted

    def _hopeless(self, round: int, what: str) -> str:
        saved = self.checkpoints is not None and self.checkpoints.manifests()
        kept = f"; the last checkpoint is in {self.checkpoints.folder}" if self.checkpoints and saved else ""
        return f"round {round}: {what}, so the run stops{kept}. A smaller algorithm.lr, or algorithm.clip, may help"

    def _log(self, line: dict[str, Any], timing: dict[str, Any]) -> None:
        self.lines.append(line)
        if self.folder is not None:
            self.folder.append(self.folder.metrics, line)
            self.folder.append(self.folder.timings, timing)
        self.watcher.round(line)

    def _save(self) -> None:
        if self.folder is None or self.checkpoints is None:
            return
        facts = {
            "counters": asdict(self.counters),
            "logs": {log.name: self.folder.length(log) for log in (self.folder.metrics, self.folder.timings)},
            "federation": self.fingerprint,
            "scores": self.scores.facts(),
        }
        self.checkpoints.save(self.done, self.server, self.store, self.scores.tensors(), facts)

    def restore(self) -> dict[str, int] | None:
        """Back to the newest checkpoint that is whole; the lengths of the logs then, or None if there is none."""
        assert self.checkpoints is not None
        saved, complaints = self.checkpoints.load(self.store)
        for complaint in complaints:
            self.watcher.tell(complaint + ("; the one before is used" if saved else "; the run starts anew"))
        if saved is None:
            return None
        if saved.facts["federation"] != self.fingerprint:
            raise EquipoiseError("the model, the data or their split are not those that the saved run began with")
        self.done, self.server = saved.round, saved.server
        self.counters = Counters(**saved.facts["counters"])
        self.scores.restore(saved.facts["scores"], saved.scores)
        logs: dict[str, int] = saved.facts["logs"]
        return logs

    def resume(self) -> None:
        """Go on from the newest checkpoint that is whole, or from the start if there is none."""
        assert self.folder is not None
        lengths = self.restore() or {}
        if self.done > self.schedule.rounds:
            raise EquipoiseError(
                f"the run in {self.folder.path} has done {self.done} rounds; rounds = {self.schedule.rounds} is less"
            )
        for log in (self.folder.metrics, self.folder.timings):
            self.folder.cut(log, lengths.get(log.name, 0))
        self.lines = self.folder.read_metrics()
        if self.done < self.schedule.rounds:
            self.folder.unfinished()
        self.folder.write_config()

    def summary(self) -> dict[str, Any]:
        # What was trained to make the models of the last evaluation (fine-tuning) is part of their price.
        samples = self.counters.gradient_samples + self.scores.training.adaptation_samples
        return {
            "algorithm": type(self.algorithm).__name__,
            "dataset": self.federation.title,
            "seed": self.schedule.seed,
            "clients": len(self.training),
            "rounds": self.done,
            "metric": self.task.metric.name,
            **self.scores.summary(),
            "bytes_up": self.counters.bytes_up,
            "bytes_down": self.counters.bytes_down,
            "parameters_shared": self.announced.parameters_shared,
            "parameters_personal": self.announced.parameters_personal,
            "gradient_samples": samples,
            "left_out": self.counters.left_out,
            "mode": self.mode,
            "seconds": round(self.counters.seconds, 3),
            "samples_per_second": round(samples / max(self.counters.seconds, 1e-9), 1),
            "peak_memory_mb": round(peak_memory_mb(), 1),
        }

    def _finish(self) -> None:
        if self.folder is None:
            return
        sizes = {name: getattr(self.federation, name).lengths for name in ("train", "validation", "test")}
        self.folder.write_clients(self.federation.names, self.federation.unseen, sizes, self.scores.tables())
        files.write_json(self.folder.summary, self.summary())
