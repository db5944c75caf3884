"""What a run is in every engine: the server's state, what was counted and written down, and where it can go on from."""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from heapq import nlargest
from typing import Any

import torch
from torch import nn

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.capabilities import PredictsFromSamples, exchanges_of, initial_upload_of
from equipoise.algorithms.local_data import Start
from equipoise.algorithms.schema import infer_schema
from equipoise.callbacks.base import RunCallback
from equipoise.config.device_classes import Devices
from equipoise.config.engine import Schedule
from equipoise.engine.aggregation_pipeline import AggregationPipeline
from equipoise.engine.checkpoint import Checkpoint, CheckpointFolder
from equipoise.engine.client_store import ClientStore
from equipoise.engine.last_uploads import LastUploadTracker, UploadStore
from equipoise.equilibrium import Solves, SolveStats, layers
from equipoise.errors import EquipoiseError, RunFailed
from equipoise.model_kinds import KINDS
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import Noise, NoisedMeanUploads, gaussian
from equipoise.state import State, Uploads
from equipoise.storage.run_folder import RunFolder
from equipoise.training.memory_usage import peak_memory_mb
from equipoise.training.task import Task

_ADVICE = "A smaller algorithm.lr, or algorithm.clip, may help"
_NOISE = "privacy.noise."
_SLOWEST = 5
_WORTH_TELLING = 0.01  # some samples are always harder than others


@dataclass
class Counters:
    bytes_up: int = 0
    bytes_down: int = 0
    gradient_samples: int = 0
    left_out: int = 0
    solves: Solves = field(default_factory=Solves)
    seconds: float = 0.0

    def sums(self) -> dict[str, int]:
        """Those that go into every line of metrics.jsonl."""
        return {
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "gradient_samples": self.gradient_samples,
        }


def _solver_figures(solves: Solves) -> dict[str, float]:
    """Iterations a solve, and the part that did not converge: of fixed points, and of gradients if they are solved."""
    figures: dict[str, float] = {}
    if solves.forward.solves:
        figures |= {"solver_iterations": solves.forward.mean, "unconverged": solves.forward.failed}
    if solves.backward.solves:
        figures |= {"gradient_iterations": solves.backward.mean, "gradients_unconverged": solves.backward.failed}
    return figures


def _plain_linear(task: Task) -> bool:
    head = None if task.head is None else task.module.get_submodule(task.head)
    return type(head) is nn.Linear and all(p.requires_grad for p in head.parameters())


def _counted(budgets: dict[str, int]) -> dict[str, int]:
    """How many clients afford each number of iterations, the most first."""
    return {str(k): n for k, n in sorted(Counter(budgets.values()).items(), reverse=True)}


class Run(ABC):
    """The base of the two engines."""

    def __init__(
        self,
        task: Task,
        algorithm: Algorithm,
        schedule: Schedule,
        start: Start,
        folder: RunFolder | None,
        watcher: RunCallback | None,
        between: AggregationPipeline | None = None,
        devices: Devices | None = None,
    ):
        self.task, self.algorithm, self.schedule = task, algorithm, schedule
        self.folder, self.watcher = folder, watcher or RunCallback()
        self.start = start
        if algorithm.requires.labels and (task.sample[1].is_floating_point() or task.sample[1].ndim != 1):
            raise EquipoiseError(
                f"{type(algorithm).__name__} looks at samples class by class, and here they have no one label each"
            )
        if algorithm.requires.linear_head and not _plain_linear(task):
            raise EquipoiseError(
                f"{type(algorithm).__name__} estimates the model's last layer by least squares, so its head must be "
                "one submodule, a linear layer of which nothing is frozen; name it with head="
            )
        self.between = between or AggregationPipeline()
        self.announced = infer_schema(algorithm, start, self.between.privacy is None)
        self.server = algorithm.init_server(start)
        self.checkpoints = None if folder is None else CheckpointFolder(folder.checkpoint)
        self.devices = devices or Devices()
        if self.devices.iterations and not any(layers(task.module)):
            raise EquipoiseError(
                "[devices] sets the iterations of equilibrium layers, and the model has none; leave the section out"
            )
        if isinstance(algorithm, PredictsFromSamples) and task.head is None:
            raise EquipoiseError(
                f"{type(algorithm).__name__} looks samples up by what the model's head reads; name the submodule that "
                "is the head"
            )
        if task.metric.name == "accuracy" and any(target > 1 for target in schedule.targets or ()):
            raise EquipoiseError(f"targets = {list(schedule.targets or ())} is not allowed; an accuracy is at most 1")
        self.rescored = False
        "is its training that of another run?"
        self.longest: int | None = None
        "how many training samples the largest client has, where that is known"
        self.budgets: dict[str, int] = {}
        "the iterations that clients afford, by their names, where devices are of several classes"
        first = initial_upload_of(algorithm, start)
        if first is not None and exchanges_of(algorithm) > 1:
            raise TypeError(f"{type(algorithm).__name__}: last messages are kept of rounds with one exchange only")
        self.last = None if first is None else LastUploadTracker(first, start.clients)
        self.malicious: frozenset[str] = frozenset()
        self.sigma = 0.0
        "standard deviation of the noise of privacy"
        self.released: Counter[str] = Counter()
        "how many messages each client has sent, by name, where that is what privacy depends on"
        self.sums, self.noise = 0, State()
        "of central noise: how many sums were released, and what is in the sum of last messages"
        self.counters = Counters()
        self.took: defaultdict[str, float] = defaultdict(float)
        "seconds that clients have taken in the round in work, by name, where each is worked on alone"
        self.done, self.step = 0, 0
        "rounds, and exchanges of the next one, of which several may be done where the engine can stop in between"
        self.lines: list[dict[str, Any]] = []
        self.complained = 0.0
        "the part of the solves in a round that did not converge, when it was last told"
        self.uncovered: Sequence[str] = ()
        "what leaves clients and privacy does not cover"
        self.store: ClientStore

    @property
    def kept(self) -> UploadStore:
        """What is kept of clients, by the numbers that the algorithm's server knows them by."""
        return self.store

    @property
    @abstractmethod
    def mode(self) -> str:
        """By what means clients are worked on, for readers."""

    @abstractmethod
    def run(self) -> None:
        """Run all rounds that are left."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the server's state and the clients', as JSON."""

    @abstractmethod
    def restored(self, saved: Checkpoint) -> None:
        """Take back what `facts` and a checkpoint's own tensors say."""

    @cached_property
    @abstractmethod
    def fingerprint(self) -> str:
        """Stands for all that a run begins with and its settings do not say."""

    def evaluates(self, round: int) -> bool:
        return round % self.schedule.evaluate_every == 0 or round == self.schedule.rounds

    def aggregate(self, round: int, uploads: Uploads, names: Sequence[str]) -> dict[int, State]:
        """The server's next state, from what came of these clients; what is to be kept of each of their messages."""
        uploads = self.between.attacked(uploads, names, self.malicious, self.server, round, self.schedule.seed)
        everyone = None if self.last is None else self.last.with_round(uploads, self.kept)
        seen = uploads if everyone is None else everyone
        reduce: Reduce = self.between.reducer
        if self.between.privacy is not None and self.between.privacy.central:
            seen = self._sealed(seen, everyone is not None)
            reduce = lambda sealed: sealed.mean()  # noqa: E731
        server = self.algorithm.aggregate(self.server, seen, reduce)
        if not server.finite():
            raise RunFailed(self.hopeless(round, "the server's new state has NaN or infinite numbers"))
        self.server = server
        return {} if self.last is None or everyone is None else self.last.take(everyone)

    def _sealed(self, uploads: Uploads, last: bool) -> NoisedMeanUploads:
        """With central noise. A sum of last messages is the sum before it and what the round's messages add to it: each
        round's noise is on what it adds, and stays in the sum."""
        noise = self.randomness(self.sums, "sum")
        fresh = gaussian(self.sigma)(State({k: torch.zeros_like(t).double() for k, t in uploads.like.items()}), noise)
        self.sums += 1
        if last:
            fresh = self.noise = State({k: t + self.noise[k] if k in self.noise else t for k, t in fresh.items()})
        return NoisedMeanUploads.of(uploads, fresh, type(self.algorithm).__name__)

    @abstractmethod
    def randomness(self, number: int, of: str) -> Noise:
        """Where the noise of privacy comes from, for what has this number."""

    @abstractmethod
    def releases(self) -> ReleaseCount:
        """What clients have released so far."""

    def find_noise(self, planned: ReleaseCount, uncovered: Sequence[str]) -> None:
        """Before the first round: how much noise privacy asks for; what it does not cover is told."""
        if (privacy := self.between.privacy) is not None:
            self.sigma = privacy.noise(planned)
            privacy.guarantee(self.sigma, planned)  # what cannot be accounted for is said now
            self.uncovered = uncovered
            what = " and ".join(uncovered)
            self.warn(
                f"privacy covers the messages that models are trained with; clients' {what} are not covered by it"
            )

    def warn(self, text: str) -> None:
        """Something that whoever started the run must know before it begins."""
        self.watcher.tell(text)

    def hopeless(self, round: int, what: str, advice: str = _ADVICE) -> str:
        saved = self.checkpoints is not None and self.checkpoints.manifests()
        kept = f"; the last checkpoint is in {self.checkpoints.folder}" if self.checkpoints and saved else ""
        return f"round {round}: {what}, so the run stops{kept}. {advice}"

    def solved(self, round: int, solves: Solves, complaint: str | None = None) -> dict[str, float]:
        """What a round's solves of equilibrium layers came to, for its line; failures are told as they get worse."""
        self.counters.solves.add(solves)
        failed = max(solves.forward.failed, solves.backward.failed)
        if failed >= max(_WORTH_TELLING, 2 * self.complained):
            self.complained = failed
            counts = f"{failed:.0%} of the solves of equilibrium layers did not converge; clients' logs say more"
            self.watcher.tell(f"round {round}: {complaint or counts}")
        return _solver_figures(solves)

    def timing(self, round: int, train: float, evaluate: float) -> dict[str, Any]:
        """A line of timings.jsonl, with the clients that took longest."""
        longest = nlargest(_SLOWEST, self.took.items(), key=lambda item: item[1])
        slowest = {name: float(f"{seconds:.4g}") for name, seconds in longest}
        self.took.clear()
        return {"round": round, "train": train, "evaluate": evaluate, **({"slowest": slowest} if slowest else {})}

    def log(self, line: dict[str, Any], timing: dict[str, Any]) -> None:
        self.lines.append(line)
        if self.folder is not None:
            self.folder.append(self.folder.metrics, line)
            self.folder.append(self.folder.timings, timing)
        self.watcher.round(line)

    def save(self, kept: dict[str, Any]) -> None:
        if self.folder is None or self.checkpoints is None:
            return
        facts = {
            "counters": asdict(self.counters),
            "logs": {log.name: self.folder.length(log) for log in self.folder.logs},
            "fingerprint": self.fingerprint,
            "privacy": {"sigma": self.sigma, "released": self.released, "sums": self.sums},
            **self.facts(),
        }
        kept |= {} if self.last is None else self.last.tensors()
        kept |= {f"{_NOISE}{name}": t for name, t in self.noise.items()}
        self.checkpoints.save(self.done, self.step, self.server, self.store, kept, facts)

    def restore(self) -> dict[str, int] | None:
        """Back to the newest checkpoint that is whole; the lengths of the logs then, or None if there is none."""
        assert self.checkpoints is not None
        saved, complaints = self.checkpoints.load(self.store)
        for complaint in complaints:
            self.watcher.tell(complaint + ("; the one before is used" if saved else "; the run starts anew"))
        if saved is None:
            return None
        if saved.facts["fingerprint"] != self.fingerprint:
            raise EquipoiseError("the model, the data or their split are not those that the saved run began with")
        self.done, self.step, self.server = saved.round, saved.step, saved.server
        self._restore_privacy(saved.facts.get("privacy", {}))
        noise = {k: t for k, t in saved.kept.items() if k.startswith(_NOISE)}
        self.noise = State({k.removeprefix(_NOISE): t for k, t in noise.items()})
        counted = dict(saved.facts["counters"])
        solves = counted.pop("solves", {})
        self.counters = Counters(**counted, solves=Solves(**{way: SolveStats(**t) for way, t in solves.items()}))
        self.restored(saved)
        if self.last is not None:
            self.last.restore(saved.kept)
        logs: dict[str, int] = saved.facts["logs"]
        return logs

    def _restore_privacy(self, facts: dict[str, Any]) -> None:
        if (privacy := self.between.privacy) is None:
            return
        if facts["sigma"] != self.sigma:
            raise EquipoiseError(
                f"the run went with sigma = {facts['sigma']:g}, found for its number of rounds; with "
                f"{self.schedule.rounds} of them privacy.target_epsilon = {privacy.target_epsilon} needs {self.sigma:g}"
            )
        self.released, self.sums = Counter(facts["released"]), facts["sums"]

    def resume(self) -> None:
        """Go on from the newest checkpoint that is whole, or from the start if there is none."""
        assert self.folder is not None
        lengths = self.restore() or {}
        if self.done > self.schedule.rounds:
            raise EquipoiseError(
                f"the run in {self.folder.path} has done {self.done} rounds; rounds = {self.schedule.rounds} is less"
            )
        for log in self.folder.logs:
            self.folder.cut(log, lengths.get(log.name, 0))
        self.lines = self.folder.read_metrics()
        if self.done < self.schedule.rounds:
            self.folder.unfinished()
        self.folder.write_config()

    def _efficiency(self) -> dict[str, Any]:
        """What the method costs: parameters, traffic, and the memory of a client at work."""
        sent = self.counters.bytes_up + self.counters.bytes_down
        return {
            "bytes_a_round": round(sent / max(self.done, 1)),
            "parameters_shared": self.announced.parameters_shared,
            "parameters_personal": self.announced.parameters_personal,
            "parameters_sent": sent // self.task.w0.element_size(),
            "step_memory_mb": round(self.task.step_bytes(self.algorithm.batch, self.longest) / 1e6, 3),
        }

    def _guarantee(self) -> dict[str, Any]:
        assert self.between.privacy is not None
        found = self.between.privacy.guarantee(self.sigma, self.releases())
        return {**found, "not_covered": list(self.uncovered)}

    def _rounds_to(self) -> dict[str, dict[str, int | None]]:
        """For each kind of model and each score that was asked for, the first evaluated round that reached it."""
        name, better = self.task.metric.name, self.task.metric.better
        found: dict[str, dict[str, int | None]] = {}
        for kind in ("global",) if self.rescored else KINDS:  # of other kinds there is the last round's score alone
            scores = [(line["round"], line[kind].get(name)) for line in self.lines if kind in line]
            if scores:
                found[kind] = {
                    f"{target:g}": next((r for r, s in scores if s is not None and not better(target, s)), None)
                    for target in self.schedule.targets or ()
                }
        return found

    def described(self, title: str, clients: int, scores: dict[str, Any], adaptation_samples: int) -> dict[str, Any]:
        """The summary that every engine gives of a run."""
        # What was trained to make the models of the last evaluation (fine-tuning) is part of their price.
        samples = self.counters.gradient_samples + adaptation_samples
        return {
            "algorithm": type(self.algorithm).__name__,
            "dataset": title,
            "seed": self.schedule.seed,
            "clients": clients,
            "rounds": self.done,
            "metric": self.task.metric.name,
            "higher_is_better": self.task.metric.higher_is_better,
            **scores,
            "bytes_up": self.counters.bytes_up,
            "bytes_down": self.counters.bytes_down,
            **self._efficiency(),
            "gradient_samples": samples,
            "left_out": self.counters.left_out,
            **_solver_figures(self.counters.solves),
            **({"privacy": self._guarantee()} if self.between.privacy is not None else {}),
            **({"malicious": sorted(self.malicious)} if self.between.attack is not None else {}),
            **({"devices": _counted(self.budgets)} if self.budgets else {}),
            **({"rounds_to": self._rounds_to()} if self.schedule.targets else {}),
            "mode": self.mode,
            "seconds": round(self.counters.seconds, 3),
            "samples_per_second": round(samples / max(self.counters.seconds, 1e-9), 1),
            "peak_memory_mb": round(peak_memory_mb(), 1),
        }
