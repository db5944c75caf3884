"""What the server of a deployment knows of its run: the clients, the counts, what is saved, restored and written."""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from flwr.serverapp import Grid

from equipoise.algorithms.capabilities import HasConsensusModel, exchanges_of
from equipoise.algorithms.local_data import Start
from equipoise.callbacks.callback_list import CallbackList
from equipoise.engine.best_models import BestModels
from equipoise.engine.checkpoint import Checkpoint
from equipoise.engine.client_store import ClientStore
from equipoise.engine.model_files import write_model
from equipoise.engine.privacy_ledger import MessageReleases, RunReleases
from equipoise.engine.run import Run
from equipoise.engine.sample_releases import UnknownSampleReleases
from equipoise.engine.shared_buffers import initial_server
from equipoise.engine.summary import summarize_run
from equipoise.engine.unscaled import described_series
from equipoise.errors import EquipoiseError
from equipoise.executors.base import ClientModel
from equipoise.flower.attendance import Attendance
from equipoise.flower.deployable import check_deployable
from equipoise.flower.deployment_plan import DeploymentPlan
from equipoise.flower.enrolment import Enrolment
from equipoise.flower.protocol import answer_shapes
from equipoise.flower.reported_forecasts import ReportedForecasts
from equipoise.flower.reported_scores import ReportedScores
from equipoise.flower.roster import Roster
from equipoise.flower.round_progress import RoundProgress
from equipoise.flower.transport import Transport
from equipoise.flower.upload_checks import UploadChecks
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import Noise, secure_noise
from equipoise.state import State
from equipoise.storage import atomic_files
from equipoise.storage.model_kinds import COLUMNS, SCORED
from equipoise.storage.run_folder import RunFolder
from equipoise.training.buffers import BUFFERS


class DeploymentState(Run):
    """The server's side of a run with real clients, apart from the rounds themselves."""

    def __init__(self, plan: DeploymentPlan, grid: Grid, folder: RunFolder, callbacks: CallbackList | None = None):
        self.plan, self.settings = plan, plan.experiment.deploy
        task, experiment = plan.task(), plan.experiment
        start = task.start(self.settings.clients, seed=experiment.schedule.seed)
        settings = experiment.algorithm, experiment.schedule
        check_deployable(task, *settings, start, experiment.privacy)
        super().__init__(task, *settings, start, folder, callbacks, experiment.uploads, experiment.devices)
        self.buffers = task.buffers
        # Clients keep their states themselves; the server may have to keep their last uploads.
        initial = State() if self.pipeline.last is None else self.pipeline.last.initial
        self.store = ClientStore(0, initial, folder.checkpoint, experiment.engine.memory_mb << 20)
        self.best = BestModels(task, 0, folder.checkpoint, experiment.engine.memory_mb << 20)
        kinds = [kind for kind in SCORED if kind != "consensus" or isinstance(self.algorithm, HasConsensusModel)]
        attack = experiment.attack
        measure = None if attack is None else attack.success()
        shapes = answer_shapes(self.schema, task.metrics, kinds, measure is not None, self.settings.horizon)
        self.transport = Transport(grid, shapes, self.report)
        self.roster = Roster(self.settings.names)
        needs_size = self.algorithm.requires.total_samples or self.schema.weighs_samples
        largest = self.settings.largest_weight
        self.enrolment = Enrolment(
            self.transport, self.roster, self.fingerprint, self.report, largest, bool(needs_size), self.settings.clients
        )
        self.checks = UploadChecks(self.schema, self.settings, experiment.privacy)
        self.attendance = Attendance(self.transport, self.enrolment, self.settings, self.schedule, self.report)
        self.id = self.attendance.run = uuid.uuid4().hex
        labels = task.sample[1][0].numel()
        forecasts = ReportedForecasts(self.settings.unit, self.settings.step, self.settings.horizon)
        self.scores = ReportedScores(
            task.metrics, experiment.schedule.select, labels, task.loss.least, largest, measure, forecasts
        )
        self.progress = RoundProgress()
        self.unlogged: tuple[dict[str, Any], dict[str, Any]] | None = None
        "the lines of a round whose models are still to be scored"
        self.round_ended = False
        "whether callbacks were already told that this round ended, before they get its scores"
        self.concluded = False
        "whether all clients were asked for the scores of the last round"
        self.starts, self.orders = 0, 0
        "number of starts of the server in this run, and of exchanges since then: together they number an order"
        self.warn_about_traps()
        scores = ["scores", *(["confusion matrices"] if task.metrics.arrays else [])]
        scores += ["errors of forecasts"] if self.settings.horizon else []
        not_covered = [*(scores if self.settings.evaluate else []), "numbers of samples"]
        self.plan_privacy(self._releases(self.schedule.rounds), not_covered)

    @property
    def mode(self) -> str:
        return "flower"

    @cached_property
    def fingerprint(self) -> str:
        return self.task.space.fingerprint()

    def draw_noise(self, number: int, purpose: str) -> Noise:
        """Return noise that nobody can predict: it must not depend on the run's seed, which everybody knows."""
        return secure_noise()

    def _releases(self, rounds: int) -> RunReleases:
        """Return the releases of a client that takes part in so many rounds."""
        exchanges = exchanges_of(self.algorithm)
        if self.plan.experiment.privacy is not None and self.plan.experiment.privacy.of_samples:
            return UnknownSampleReleases(rounds * exchanges)
        return MessageReleases(ReleaseCount(rounds, exchanges))

    def releases(self) -> RunReleases:
        """Count every order to train, whether or not its reply was used; participation is not secret here."""
        privacy, ledger = self.pipeline.settings.privacy, self.pipeline.ledger
        assert privacy is not None
        most = ledger.sums if privacy.central else max(ledger.released.values(), default=0)
        return self._releases(-(-most // exchanges_of(self.algorithm)))

    def report(self, event: str, text: str) -> None:
        """Show a message to the operator, and keep it in events.jsonl."""
        self.callbacks.on_message(text)
        self.note(event, text=text)

    def warn(self, text: str) -> None:
        self.report("warning", text)

    def note(self, event: str, **facts: Any) -> None:
        """Append a line to events.jsonl."""
        assert self.folder is not None
        self.folder.append(self.folder.events, {"round": self.done, "event": event, **facts})

    def _set_malicious(self, names: frozenset[str]) -> None:
        self.pipeline.adversary.malicious = self.scores.malicious = names

    def _begin(self, start: Start) -> None:
        """Set what all clients begin with, and how many there are."""
        self.start = start
        if not self.done and not self.step:
            self.server = initial_server(self.task, self.algorithm, start, self.private)
        shared = initial_server(self.task, self.algorithm, start, self.private).get(BUFFERS)
        self.pipeline.begin(start, shared)
        if self.pipeline.last is not None:
            self.store.initial = self.pipeline.last.initial

    def facts(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "starts": self.starts,
            "roster": self.roster.facts(),
            "refused": dict(self.transport.refused),
            "bytes": [self.transport.bytes_sent, self.transport.bytes_received],
            "clients": self.start.clients,
            "samples": self.start.samples,
            "malicious": sorted(self.pipeline.malicious),
            "budgets": self.budgets,
            "unlogged": self.unlogged,
            "round_ended": self.round_ended,
            "concluded": self.concluded,
            **self.progress.facts(self.client_seconds),
            **self.checks.facts(),
            "tally": self.scores.facts(),
        }

    def restored(self, saved: Checkpoint) -> None:
        facts = saved.facts
        every = [facts, *(other for other in saved.all_facts if other.get("id") == facts["id"])]
        self.id, self.starts = facts["id"], self._most_starts(every)
        for other in every:  # what was released stays released when the server goes back
            self.pipeline.ledger.keep_releases(other.get("privacy", {}))
        self.attendance.run = self.id
        self.scores.restore(facts["tally"], saved.kept)
        self.roster.restore(facts["roster"])
        self.transport.refused.update(facts["refused"])
        self.transport.bytes_sent, self.transport.bytes_received = facts["bytes"]
        self.unlogged = tuple(facts["unlogged"]) if facts["unlogged"] else None
        self.round_ended, self.concluded = facts.get("round_ended", False), facts.get("concluded", False)
        self.budgets = facts.get("budgets", {})
        self.client_seconds.update(self.progress.restore(facts, saved.kept))
        self._set_malicious(frozenset(facts["malicious"]))
        self.checks.restore(facts)
        self._begin(replace(self.start, w0=saved.kept["w0"], clients=facts["clients"], samples=facts["samples"]))
        self.buffers = saved.kept["buffers"]

    def _most_starts(self, every: Sequence[dict[str, Any]]) -> int:
        """Return how often the server has started at most, because numbers of orders must not be used again."""
        assert self.folder is not None
        events = self.folder.events
        begun = events.read_bytes().count(b'"event": "begin"') if events.exists() else 0
        return max([begun, *(int(facts["starts"]) for facts in every)])

    def resume_option(self, back: int) -> str:
        given = f"resume=true back={back}" if back else "resume=true"
        return f'{super().resume_option(back)} (or --run-config "{given}")'

    def training_clients(self) -> list[str]:
        return sorted(name for name, member in self.roster.members.items() if not member.unseen)

    def client_name(self, number: int) -> str:
        return self.roster.name_of(number)

    def no_validation(self) -> str:
        return "" if self.settings.evaluate else "clients do not report any, as deploy.evaluate = false"

    def validation_scores(self, kind: str) -> dict[str, float]:
        board, names = self.scores.board(), self.scores.names(unseen=False)
        column = board.tables()[kind][:, COLUMNS.index("validation_metric")]
        return {name: float(score) for name, score, has in zip(names, column, board.validates, strict=True) if has}

    def no_personal_models(self) -> str:
        return "in a deployment, personal models stay with their clients"

    def personal_models(self, clients: Sequence[str]) -> Iterator[ClientModel]:
        raise EquipoiseError(self.no_personal_models())

    def save_checkpoint(self) -> None:
        """Write a checkpoint after every exchange: clients learn only then which updates were accepted."""
        start = {"w0": self.start.w0, "buffers": self.buffers}
        self.save(start | self.progress.tensors(begun=self.step > 0) | self.scores.tensors())

    def summary(self) -> dict[str, Any]:
        """Return what summary.json contains."""
        training = [name for name, member in self.roster.members.items() if not member.unseen]
        return {
            **summarize_run(self, self.plan.title, len(training), self.scores.summary(), self.scores.samples()),
            **({"counts_missing": uncounted} if (uncounted := self._uncounted()) else {}),
            "refused": dict(sorted(self.transport.refused.items())),
            "message_bytes_down": self.transport.bytes_sent,
            "message_bytes_up": self.transport.bytes_received,
        }

    def _uncounted(self) -> list[str]:
        """Return the clients whose samples are missing in the sums, because they do not report them."""
        return sorted(member.name for member in self.roster.members.values() if not member.counts)

    def _finish(self) -> None:
        assert self.folder is not None
        if self.scores.rows:
            self.folder.write_clients(*self.scores.tables())
        if (forecasts := self.scores.forecast_scores()) is not None:
            self.folder.write_table(self.folder.forecasts, forecasts.columns, forecasts.table())
        self.best.write(self.folder.path, {})
        vector = self.algorithm.global_model(self.server)
        if vector is not None and (BUFFERS in self.server or not self.task.buffer_names):
            module = self.task.to_module(vector, self.global_buffers())
            series = described_series(None, self.task.loss.pinball)
            write_model(self.folder.path / "global.safetensors", module, *self.plan.described(), "global", series)
        summary = self.summary()
        atomic_files.write_json(self.folder.summary, summary)
        self.report_end(summary)
        self.note("finished")

    def report_stop(self, text: str) -> None:
        super().report_stop(text)
        self.note("stopped", text=text)
