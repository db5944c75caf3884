"""A run in either engine: the server's state, what was counted and logged, and how it is saved and resumed."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
from equipoise.engine.compatibility import check_attack, check_compatibility, check_reducer
from equipoise.engine.counters import Counters, solver_figures
from equipoise.engine.last_uploads import UploadStore
from equipoise.engine.privacy_ledger import RunReleases
from equipoise.engine.shared_buffers import initial_server, message_schema
from equipoise.engine.traps import find_traps
from equipoise.equilibrium import Solves, SolveStats
from equipoise.errors import EquipoiseError, RunFailed
from equipoise.executors.base import ClientModel
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
        self.private = uploads.privacy is not None and not uploads.privacy.of_samples
        "whether messages are private because of noise on them; with noise on gradients they need none"
        self.server = initial_server(task, algorithm, start, self.private)
        self.schema = message_schema(task, algorithm, start, self.private)
        self.checkpoints = (
            None if folder is None else CheckpointFolder(folder.checkpoint, self.ranks, schedule.keep_checkpoints)
        )
        check_reducer(algorithm, uploads, self.server, self.schema)
        check_attack(algorithm, uploads, self.server, self.schema)
        self.pipeline = AggregationPipeline(
            uploads, algorithm, start, self.draw_noise, self.server.get(BUFFERS), schedule.rounds, self.client_name
        )
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
    def client_name(self, number: int) -> str:
        """Return the name of the client that the algorithm's server knows by this number."""

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
    def releases(self) -> RunReleases:
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
        if self.pipeline.settings.attack is not None:
            self.pipeline.adversary.clients = tuple(sorted(self.training_clients()))
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
        if (attack := self.pipeline.settings.attack) is not None:
            cohort = self.schedule.cohort(self.start.clients)
            expected = len(attack.clients) / self.start.clients if attack.clients else attack.fraction
            for text in attack.notes(cohort, round(expected * cohort)):
                self.warn(text)

    def plan_privacy(self, planned: RunReleases, not_covered: list[str]) -> None:
        """Find the noise of privacy before the first round, and warn about what it does not cover."""
        if (text := self.pipeline.ledger.plan(planned, not_covered)) is not None:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Report something important to the user before the run begins."""
        self.callbacks.on_message(text)

    def failure(self, round: int, what: str, advice: str | None = None) -> str:
        """Return the sentence for a run that cannot continue; without advice, for a model that has gone bad."""
        advice = f"{_ADVICE}{self.way_back()}" if advice is None else advice
        saved = self.checkpoints is not None and self.checkpoints.manifests()
        kept = f"; the last checkpoint is in {self.checkpoints.folder}" if self.checkpoints and saved else ""
        return f"round {round}: {what}, so the run stops{kept}. {advice}"

    def way_back(self) -> str:
        """Return how to go back to before the round that last changed the server; empty if no checkpoint does."""
        suspect = self.done + (self.step > 0)
        places = [] if self.checkpoints is None else self.checkpoints.places()
        for back, (round, step) in enumerate(places):
            if round + (step > 0) < suspect:
                return (
                    f"; if the model has gone bad, the suspect is round {suspect}, the last that changed it, and "
                    f"{self.resume_option(back)} continues from round {round}"
                )
        return ""

    def resume_option(self, back: int) -> str:
        """Return how a user resumes the run from the checkpoint that is so many before the newest one."""
        return f"--resume --back {back}" if back else "--resume"

    def count_solves(self, round: int, solves: Solves, complaint: str | None) -> dict[str, float]:
        """Count the equilibrium solves of a round and return their figures; warn when failures become frequent.

        Args:
            round: the number of the round.
            solves: the solves of its clients.
            complaint: a sentence about those that should have converged and did not, if there are any.
        """
        self.counters.solves.add(solves)
        failed = max(solves.forward.unexpected, solves.backward.unexpected)
        if complaint is not None and failed >= max(_WORTH_REPORTING, 2 * self.reported_unconverged):
            self.reported_unconverged = failed
            self.callbacks.on_message(f"round {round}: {complaint}")
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
            **(self.folder.log_facts() if self.ranks.leader else {}),
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

    def restore(self, back: int = 0, check: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any] | None:
        """Restore a checkpoint; return its facts, or None if there is none.

        Args:
            back: 0 for the newest intact checkpoint, N for the Nth before it.
            check: raises ValueError if a checkpoint with these facts cannot be used.
        """
        assert self.checkpoints is not None
        saved, complaints = self.checkpoints.load({"store": self.store, FOLDER: self.best.store}, back, check)
        for complaint in complaints:
            self.callbacks.on_message(complaint + ("; the one before is used" if saved else ""))
        if saved is None:
            return None
        try:
            self._restore(saved)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
            where = f"{self.checkpoints.folder}, of round {saved.round},"
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EquipoiseError(
                f"the checkpoint in {where} is not that of a run with these settings ({what}); go back to an older one "
                "with --resume --back 1, or start the run again with another --out"
            ) from error
        return saved.facts

    def _restore(self, saved: Checkpoint) -> None:
        assert self.checkpoints is not None
        if (difference := self.find_difference(saved.facts["fingerprint"])) is not None:
            raise EquipoiseError(f"the run in {self.checkpoints.folder.parent} cannot be resumed: {difference}")
        if (BUFFERS in saved.server) != (BUFFERS in self.server):
            raise EquipoiseError(
                "the saved run kept BatchNorm statistics with the clients, as version 0.1 always did; resume it with "
                "algorithm.buffers = 'local'"
            )
        formats = {name: dtype for name, (_, dtype) in self.schema.server.items()}
        if {name: t.dtype for name, t in saved.server.items()} != formats:
            raise ValueError("the server's state has other fields, or numbers of another format")
        self.done, self.step, self.server = saved.round, saved.step, saved.server.to(self.task.device)
        self.stopped, self.callbacks.saved = saved.facts.get("stopped"), saved.facts.get("callbacks", {})
        self.pipeline.restore_ledger(saved.facts, saved.kept, self.schedule.rounds)
        counted = dict(saved.facts["counters"])
        solves = counted.pop("solves", {})
        self.counters = Counters(**counted, solves=Solves(**{way: SolveStats(**t) for way, t in solves.items()}))
        self.restored(saved)
        self.pipeline.restore_memory(saved.kept)

    def resume(self, back: int = 0) -> None:
        """Continue from a checkpoint, or from the start if there is none.

        Args:
            back: 0 for the newest intact checkpoint, N for the Nth before it.
        """
        assert self.folder is not None
        changes: list[str] = []

        def check(facts: dict[str, Any]) -> None:
            assert self.folder is not None
            if (change := self.folder.find_change(self.folder.metrics, facts)) is not None:
                changes.append(change)
                raise ValueError(change)

        facts = self.restore(back, check)
        if facts is None and changes:
            raise EquipoiseError(
                f"the run in {self.folder.path} cannot be resumed: {changes[0]}; restore that file, or start the run "
                "again with another --out"
            )
        if facts is None and not self.folder.new:
            self.warn(f"there is no usable checkpoint in {self.folder.checkpoint}; the run starts from its beginning")
        if back:
            self.warn(f"the run goes back to its checkpoint of round {self.done}")
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
            self._cut_logs(self.folder, facts or {})
            if self.done < self.schedule.rounds and self.stopped is None:
                self.folder.unfinished()
            self.folder.write_config()
        self.ranks.barrier()
        self.lines = self.folder.read_metrics()

    def _cut_logs(self, folder: RunFolder, facts: dict[str, Any]) -> None:
        """Cut the logs to what they were at a checkpoint; timings are no result, and may be missing or changed."""
        for log in folder.logs:
            if log == folder.timings and (change := folder.find_change(log, facts)) is not None:
                aside = folder.set_aside(log) if log.exists() else None
                kept = "" if aside is None else f", and the old one is {aside.name}"
                self.warn(f"{change}; a new one begins with round {self.done + 1}{kept}")
                log.touch()
            else:
                folder.cut(log, facts.get("logs", {}).get(log.name, 0))
