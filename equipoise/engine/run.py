"""A run in either engine: the server's state, what was counted and logged, and how it is saved and resumed."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from heapq import nlargest
from typing import Any

from torch import Tensor, nn

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import Start
from equipoise.callbacks.callback_list import CallbackList
from equipoise.config.device_classes import Devices
from equipoise.config.engine import Schedule
from equipoise.config.uploads import UploadSettings
from equipoise.distributed.ranks import Ranks
from equipoise.engine.aggregation_pipeline import AggregationPipeline
from equipoise.engine.best_models import FOLDER, BestModels
from equipoise.engine.checkpoint import Checkpoint, CheckpointFolder
from equipoise.engine.client_store import ClientStore
from equipoise.engine.compatibility import check_compatibility
from equipoise.engine.counters import Counters, solver_figures
from equipoise.engine.last_uploads import UploadStore
from equipoise.engine.shared_buffers import initial_server, message_schema
from equipoise.engine.traps import find_traps
from equipoise.equilibrium import Solves, SolveStats
from equipoise.errors import EquipoiseError, RunFailed
from equipoise.executors.base import ClientModel
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import Noise
from equipoise.state import State, UploadsOfRound
from equipoise.storage.run_folder import RunFolder, read_toml
from equipoise.training.buffers import BUFFERS
from equipoise.training.task import Task

_ADVICE = "A smaller algorithm.lr, or algorithm.clip, may help"
_SLOWEST = 5
_WORTH_REPORTING = 0.01  # some samples are always harder than others


class Run(ABC):
    """The base of the two engines, `Simulation` and `Deployment`."""

    def __init__(
        self,
        task: Task,
        algorithm: Algorithm,
        schedule: Schedule,
        start: Start,
        folder: RunFolder | None,
        callbacks: CallbackList | None,
        uploads: UploadSettings | None = None,
        devices: Devices | None = None,
        ranks: Ranks | None = None,
    ):
        self.task, self.algorithm, self.schedule, self.start = task, algorithm, schedule, start
        self.folder, self.callbacks = folder, callbacks or CallbackList()
        self.devices = devices or Devices()
        self.ranks = ranks or Ranks()
        check_compatibility(task, algorithm, schedule, self.devices)
        uploads = uploads or UploadSettings()
        self.private = uploads.privacy is not None
        self.server = initial_server(task, algorithm, start, self.private)
        self.schema = message_schema(task, algorithm, start, self.private)
        self.checkpoints = None if folder is None else CheckpointFolder(folder.checkpoint, self.ranks)
        self.pipeline = AggregationPipeline(uploads, algorithm, start, self.draw_noise, self.server.get(BUFFERS))
        self.rescored = False
        "whether its training was taken from another run"
        self.longest: int | None = None
        "number of training samples of the largest client, where that is known"
        self.budgets: dict[str, int] = {}
        "iteration limit of each client by name, where devices are of several classes"
        self.counters = Counters()
        self.checkpoint_wanted = False
        "whether a callback asked for a checkpoint after this round"
        self.client_seconds: defaultdict[str, float] = defaultdict(float)
        "seconds that clients have taken in the current round, by name, where each is trained alone"
        self.stopped: str | None = None
        "why a callback ended the run before its last round, if one did"
        self.done, self.step = 0, 0
        "finished rounds, and finished exchanges of the next one, if the engine can stop between two"
        self.lines: list[dict[str, Any]] = []
        self.reported_unconverged = 0.0
        "the unconverged fraction of solves when it was last reported"
        self.store: ClientStore
        self.best: BestModels

    @property
    def upload_store(self) -> UploadStore:
        """Return the clients' states by the numbers that the algorithm's server uses."""
        return self.store

    @property
    @abstractmethod
    def mode(self) -> str:
        """Return how clients are trained, for readers."""

    @abstractmethod
    def run(self) -> None:
        """Run all rounds that are left."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides the states of server and clients, as JSON."""

    @abstractmethod
    def restored(self, saved: Checkpoint) -> None:
        """Restore what `facts` and the engine's own tensors saved."""

    @abstractmethod
    def save_checkpoint(self) -> None:
        """Write a checkpoint of the run as it is."""

    @abstractmethod
    def training_clients(self) -> list[str]:
        """Return the names of the clients that train, as far as they are known."""

    @abstractmethod
    def no_validation(self) -> str:
        """Return why no model can be scored on validation samples; empty if they can."""

    @abstractmethod
    def validation_scores(self, kind: str) -> dict[str, float]:
        """Return the last scores of a kind of model of the benign clients with validation samples, by name."""

    @abstractmethod
    def no_personal_models(self) -> str:
        """Return why the server cannot make personal models; empty if it can."""

    @abstractmethod
    def personal_models(self, clients: Sequence[str]) -> Iterator[ClientModel]:
        """Yield the current personal models of these clients."""

    def own_clients(self, clients: Sequence[str]) -> Sequence[str]:
        """Return those of these clients whose models can be made in this process."""
        return clients

    def module_of(self, model: ClientModel) -> nn.Module:
        """Return the module that a client predicts with."""
        return self.task.to_module(model.vector, model.buffers)

    @cached_property
    @abstractmethod
    def fingerprint(self) -> Any:
        """Return what a run begins with beyond its settings, as JSON: digests by which a checkpoint is recognised."""

    def find_difference(self, saved: Any) -> str | None:
        """Return what differs between a saved fingerprint and that of this run; None if nothing does."""
        return None if saved == self.fingerprint else "the model's parameters have other names or shapes"

    @abstractmethod
    def draw_noise(self, number: int, purpose: str) -> Noise:
        """Return the source of privacy's noise for a number and a purpose."""

    @abstractmethod
    def releases(self) -> ReleaseCount:
        """Return what clients have released so far."""

    def global_buffers(self) -> Tensor | None:
        """Return the buffers of the global model, or None if there are none or each client has its own."""
        shared = self.server.get(BUFFERS)
        return None if shared is None else self.task.buffer_layout.merged(shared, self.task.buffers)

    def learning_rate(self, round: int) -> float:
        """Return the learning rate of local training in a round."""
        return self.algorithm.lr * self.algorithm.schedule.factor(round, self.schedule.rounds)

    def evaluates(self, round: int) -> bool:
        """Tell whether the models of this round are scored."""
        return round % self.schedule.evaluate_every == 0 or round == self.schedule.rounds

    def aggregate(self, round: int, uploads: UploadsOfRound, names: list[str]) -> dict[int, State]:
        """Set the server's next state, and return what is to be kept of each upload."""
        server, kept = self.pipeline.aggregate(round, self.server, uploads, names, self.upload_store)
        if BUFFERS in server:
            server = State(server, **{BUFFERS: self.task.buffer_layout.valid(server[BUFFERS])})
        if not server.finite():
            raise RunFailed(self.failure(round, "the server's new state has NaN or infinite numbers"))
        if self.ranks.size > 1:
            self.ranks.check_equal(f"results in round {round}", server.digest())
        self.server = server
        return kept

    def warn_about_traps(self) -> None:
        """Warn about settings that are allowed and probably not meant."""
        for text in find_traps(self.task.space, self.algorithm, self.schedule, self.schema, self.start.clients):
            self.warn(text)

    def plan_privacy(self, planned: ReleaseCount, not_covered: list[str]) -> None:
        """Find the noise of privacy before the first round, and warn about what it does not cover."""
        if (text := self.pipeline.ledger.plan(planned, not_covered)) is not None:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Report something important to the user before the run begins."""
        self.callbacks.on_message(text)

    def failure(self, round: int, what: str, advice: str = _ADVICE) -> str:
        """Return the sentence for a run that cannot continue."""
        saved = self.checkpoints is not None and self.checkpoints.manifests()
        kept = f"; the last checkpoint is in {self.checkpoints.folder}" if self.checkpoints and saved else ""
        return f"round {round}: {what}, so the run stops{kept}. {advice}"

    def count_solves(self, round: int, solves: Solves, complaint: str | None = None) -> dict[str, float]:
        """Count the equilibrium solves of a round and return their figures; warn when failures become frequent."""
        self.counters.solves.add(solves)
        failed = max(solves.forward.failed, solves.backward.failed)
        if failed >= max(_WORTH_REPORTING, 2 * self.reported_unconverged):
            self.reported_unconverged = failed
            counts = f"{failed:.0%} of the solves of equilibrium layers did not converge; see the clients' logs"
            self.callbacks.on_message(f"round {round}: {complaint or counts}")
        return solver_figures(solves)

    def timing(self, round: int, train: float, evaluate: float) -> dict[str, Any]:
        """Return a line of timings.jsonl, with the slowest clients."""
        longest = nlargest(_SLOWEST, self.client_seconds.items(), key=lambda item: item[1])
        slowest = {name: float(f"{seconds:.4g}") for name, seconds in longest}
        self.client_seconds.clear()
        return {"round": round, "train": train, "evaluate": evaluate, **({"slowest": slowest} if slowest else {})}

    def log(self, line: dict[str, Any], timing: dict[str, Any]) -> None:
        """Write the lines of a round, and report it to callbacks that only watch."""
        self.lines.append(line)
        if self.folder is not None and self.ranks.leader:
            self.folder.append(self.folder.metrics, line)
            self.folder.append(self.folder.timings, timing)
        self.callbacks.on_round_end(line, affects_results=False)

    def report_end(self, summary: dict[str, Any]) -> None:
        """Report the end of the run, and why a callback ended it, if one did."""
        if self.stopped is not None:
            self.report_stop(f"the run stopped after round {self.done}: {self.stopped}")
        self.callbacks.on_run_end(summary)

    def report_stop(self, text: str) -> None:
        """Report that a callback ended the run."""
        self.callbacks.on_stop(text)

    def save(self, kept: dict[str, Any]) -> None:
        """Write a checkpoint that includes these tensors of the engine."""
        if self.folder is None or self.checkpoints is None:
            return
        facts = {
            "counters": asdict(self.counters),
            "logs": {log.name: self.folder.length(log) for log in self.folder.logs},
            "fingerprint": self.fingerprint,
            **self.pipeline.facts(),
            **({"stopped": self.stopped} if self.stopped is not None else {}),
            **({"callbacks": states} if (states := self.callbacks.state()) else {}),
            **self.facts(),
        }
        tensors = kept | self.pipeline.tensors()
        stores = {"store": self.store}
        if self.ranks.any(bool(self.best.stores())):
            stores[FOLDER] = self.best.store
        self.checkpoints.save(self.done, self.step, self.server, stores, tensors, facts)

    def restore(self) -> dict[str, int] | None:
        """Restore the newest valid checkpoint; return the lengths of the logs then, or None if there is none."""
        assert self.checkpoints is not None
        saved, complaints = self.checkpoints.load({"store": self.store, FOLDER: self.best.store})
        for complaint in complaints:
            self.callbacks.on_message(complaint + ("; the one before is used" if saved else "; the run starts again"))
        if saved is None:
            return None
        if (difference := self.find_difference(saved.facts["fingerprint"])) is not None:
            raise EquipoiseError(f"the run in {self.checkpoints.folder.parent} cannot be resumed: {difference}")
        if (BUFFERS in saved.server) != (BUFFERS in self.server):
            raise EquipoiseError(
                "the saved run kept BatchNorm statistics with the clients, as version 0.1 always did; resume it with "
                "algorithm.buffers = 'local'"
            )
        self.done, self.step, self.server = saved.round, saved.step, saved.server.to(self.task.device)
        self.stopped, self.callbacks.saved = saved.facts.get("stopped"), saved.facts.get("callbacks", {})
        self.pipeline.restore_ledger(saved.facts, saved.kept, self.schedule.rounds)
        counted = dict(saved.facts["counters"])
        solves = counted.pop("solves", {})
        self.counters = Counters(**counted, solves=Solves(**{way: SolveStats(**t) for way, t in solves.items()}))
        self.restored(saved)
        self.pipeline.restore_last(saved.kept)
        logs: dict[str, int] = saved.facts["logs"]
        return logs

    def resume(self) -> None:
        """Continue from the newest valid checkpoint, or from the start if there is none."""
        assert self.folder is not None
        lengths = self.restore() or {}
        if self.done > self.schedule.rounds:
            raise EquipoiseError(
                f"the run in {self.folder.path} has done {self.done} rounds; rounds = {self.schedule.rounds} is less"
            )
        before = read_toml(self.folder.config).get("rounds")
        if before not in (None, self.schedule.rounds) and self.algorithm.schedule.depends_on_rounds:
            self.warn(
                f"algorithm.schedule depends on the number of rounds, which was {before} and is now "
                f"{self.schedule.rounds}: rounds from here on have other rates than in a run that began with it"
            )
        if self.ranks.leader:
            for log in self.folder.logs:
                self.folder.cut(log, lengths.get(log.name, 0))
            if self.done < self.schedule.rounds and self.stopped is None:
                self.folder.unfinished()
            self.folder.write_config()
        self.ranks.barrier()
        self.lines = self.folder.read_metrics()
