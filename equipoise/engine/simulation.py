"""The simulator, which runs all rounds of a federation: in this process, or in several that do the same steps."""

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
from torch import nn

from equipoise import randomness
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import exchanges_of
from equipoise.attacks import TriggeredSamples, poison_samples, prepared_attack
from equipoise.callbacks.callback_list import CallbackList
from equipoise.config.device_classes import Devices
from equipoise.config.engine import Engine, Schedule
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import Federation
from equipoise.distributed.placement import Placement
from equipoise.distributed.ranks import Ranks
from equipoise.engine.best_models import BestModels
from equipoise.engine.checkpoint import Checkpoint
from equipoise.engine.client_store import ClientStore, RenumberedStore
from equipoise.engine.compatibility import check_batches, check_data
from equipoise.engine.counters import diagnostic_figures
from equipoise.engine.forecast_results import models_made_alone, score_forecasts
from equipoise.engine.origin import describe_origin, find_difference, find_legacy_difference, legacy_fingerprint
from equipoise.engine.privacy_ledger import RunReleases
from equipoise.engine.round_facts import ResultFacts, RoundFacts, accepted_uploads, share_facts
from equipoise.engine.run import Run
from equipoise.engine.run_context import EngineContext
from equipoise.engine.run_output import sharing_figures, shown_states, write_results
from equipoise.engine.signals import stop_on_interrupt
from equipoise.engine.simulated_releases import SimulatedReleases
from equipoise.engine.summary import summarize_run
from equipoise.errors import EquipoiseError, Interrupted, ProcessLost, RunFailed
from equipoise.evaluation.attack_success import SuccessCounter
from equipoise.evaluation.evaluator import AT_ONCE
from equipoise.evaluation.forecast_scores import ForecastScores
from equipoise.evaluation.kept_predictions import check_room
from equipoise.evaluation.run_scores import RunScores
from equipoise.evaluation.scoreboard import score_columns
from equipoise.executors.base import (
    ClientJob,
    ClientModel,
    ClientResult,
    Executor,
    HeldState,
    HostStates,
    ModelKind,
    with_engine_state,
)
from equipoise.executors.build import build_executor
from equipoise.privacy.mechanisms import Noise, seeded_noise
from equipoise.state import State
from equipoise.storage.model_kinds import COLUMNS
from equipoise.storage.run_folder import RunFolder
from equipoise.torch_device import CPU
from equipoise.training.buffers import BUFFERS, broadcast
from equipoise.training.sample_privacy import SamplePrivacy, check_engine
from equipoise.training.task import Task

_NAMED = 3
"""Number of clients that a message names; of others it says how many there are."""


class Simulation(Run):
    """A run in which all clients are simulated."""

    def __init__(
        self,
        task: Task,
        federation: Federation,
        algorithm: Algorithm,
        schedule: Schedule,
        engine: Engine,
        folder: RunFolder | None = None,
        callbacks: CallbackList | None = None,
        uploads: UploadSettings | None = None,
        devices: Devices | None = None,
        ranks: Ranks | None = None,
    ):
        """Create a simulation.

        Args:
            task: the model, its loss and its metric.
            federation: the clients and their data.
            algorithm: the algorithm.
            schedule: number of rounds, participation, evaluation and checkpoints.
            engine: how clients are trained on this machine.
            folder: the run folder; without it nothing is written.
            callbacks: receive the events of the run.
            uploads: the attack, the reducer and privacy.
            devices: the device classes of the clients.
            ranks: the processes of the run; without it this is the only one.
        """
        task = task.with_own_modules(algorithm, schedule.seed)
        self.federation = federation.prepared(task.dtype, task.channels_last)
        check_data(task, federation)
        check_room(federation, task)
        self.training, _ = federation.by_name
        self.number, self.by_number = federation.numbers, list(federation.numbers)
        samples = int(federation.train.lengths[self.training].sum())
        start = task.start(len(self.training), samples, schedule.seed)
        super().__init__(task, algorithm, schedule, start, folder, callbacks, uploads, devices, ranks)
        self.longest = int(federation.train.lengths[self.training].max())
        if task.smallest_batch > 1:
            check_batches(task, algorithm, dict(zip(federation.names, federation.train.lengths, strict=True)))
        if algorithm.requires.validation:
            self._check_validation()
        self.budgets = self.devices.budgets([federation.names[who] for who in self.training], schedule.seed)
        if (attack := self.pipeline.settings.attack) is not None:
            names = [federation.names[who] for who in self.training]
            adversary = self.pipeline.adversary
            adversary.malicious = attack.malicious(names, schedule.seed)
            adversary.attack = attack = prepared_attack(self.federation, attack, adversary.malicious)
            self.federation = poison_samples(self.federation, attack, adversary.places, schedule.seed)
        self.engine = engine
        self.cohort = schedule.cohort(len(self.training))
        self.warn_about_traps()
        self.privacy = SimulatedReleases(self.pipeline, schedule, len(self.training), self.cohort, self.sample)
        self._plan_privacy(engine)
        initial = with_engine_state(algorithm.init_client(start), task, int(federation.train.lengths.max()))
        if self.pipeline.last is not None:
            initial |= self.pipeline.last.initial
        initial = initial.to(CPU)  # states cross to the device and back when a client takes part
        states = None if folder is None else folder.checkpoint
        part = self.ranks.rank, self.ranks.size
        self.store = ClientStore(len(federation), initial, states, engine.memory_mb << 20, part=part)
        self.best = BestModels(task, len(federation), states, engine.memory_mb << 20, part)
        self._forecasts: tuple[int, ForecastScores] | None = None
        self.interrupted = threading.Event()
        self.executor = self.new_executor()
        self.placement = Placement(self.executor.shards, self.ranks)
        if self.ranks.size > 1:
            if folder is None:
                raise EquipoiseError("a run in several processes needs a run folder; say out=...")
            kind = [version("torch"), self.executor.mode, task.device.type, asdict(self.placement.shards)]
            self.ranks.check_equal("versions of torch, modes or kinds of device", kind)
            self.ranks.check_equal("data or initial weights", self.fingerprint)
            if (idle := self.ranks.size - min(self.placement.shards.used, self.ranks.size)) > 0:
                self.callbacks.on_message(
                    f"{idle} of the {self.ranks.size} processes have no clients: so few take part in a round that they "
                    f"form {self.placement.shards.used} groups"
                )
            self.store.own = np.array([self.owns(who) for who in range(len(federation))])
            self.best.store.own = np.append(self.store.own, self.ranks.leader)
        self.executor.prepare(self.callbacks.on_message)
        self.scores = self.new_scores()
        self.scores_missing = False
        "whether the last checkpoint has scores by other metrics"
        self.failed_elsewhere = False
        "whether a callback failed in any process in this round"

    def __repr__(self) -> str:
        name, clients = type(self.algorithm).__name__, len(self.federation)
        return f"Simulation({name}, {clients} clients, {self.done} of {self.schedule.rounds} rounds)"

    def _check_validation(self) -> None:
        without = [self.federation.names[who] for who in self.training if not len(self.federation.validation[who])]
        if len(without) == len(self.training):
            raise EquipoiseError(
                f"{type(self.algorithm).__name__} learns from validation samples, but no client has any; "
                "add a validation part to data.split"
            )
        if without:
            others = f" and {len(without) - 1} others have" if len(without) > 1 else " has"
            self.callbacks.on_message(
                f"{without[0]}{others} no validation samples, so nothing is learned from validation there"
            )

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        return describe_origin(self.federation, self.task)

    def find_difference(self, saved: Any) -> str | None:
        if isinstance(saved, str):
            return find_legacy_difference(saved, legacy_fingerprint(self.federation, self.task))
        return find_difference(saved, self.fingerprint)

    @property
    def upload_store(self) -> RenumberedStore:
        return RenumberedStore(self.store, self.by_number)

    @property
    def mode(self) -> str:
        return self.executor.mode

    def close(self) -> None:
        """Stop the executor."""
        self.executor.close()

    def _plan_privacy(self, engine: Engine) -> None:
        """Find the noise of privacy, and what is not covered by it."""
        not_covered = ["scores", "failures to train"]
        privacy = self.pipeline.settings.privacy
        check_engine(privacy, engine.compile)
        if privacy is not None and privacy.of_samples:
            names, lengths = self.federation.names, self.federation.train.lengths
            rounds = {names[who]: count for who, count in self.privacy.rounds_of_clients().items()}
            self.privacy.samples = SamplePrivacy.of(privacy, self.task, self.algorithm, self.start, rounds)
            self.privacy.sizes = dict(zip(names, map(int, lengths), strict=True))
            not_covered = ["scores", "numbers of samples"]
        self.plan_privacy(self.privacy.planned(), not_covered)

    def new_executor(self) -> Executor:
        """Build an executor for this run."""
        executor = build_executor(self.engine, self.task, self.federation, self.algorithm, self.schedule)
        executor.privacy = self.privacy.samples
        return executor

    def sample(self, round: int) -> list[int]:
        """Draw the clients that take part in a round, from the training clients in the order of their names."""
        if self.schedule.cohorts == "turns":
            order = randomness.generator(self.schedule.seed, "turns").permutation(len(self.training))
            turn = np.arange((round - 1) * self.cohort, round * self.cohort) % len(self.training)
            return [self.training[rank] for rank in np.sort(order[turn])]
        rng = randomness.generator(self.schedule.seed, "participation", round)
        ranks = rng.choice(len(self.training), self.cohort, replace=False)
        return [self.training[rank] for rank in np.sort(ranks)]

    def run(self) -> None:
        """Run all rounds that are left."""
        try:
            self.callbacks.on_run_begin(EngineContext(self))
            with stop_on_interrupt(self.interrupted):
                if self.scores_missing and self.over:
                    self.score()
                while not self.over:
                    if not self.advance():
                        break
                    self.check_callbacks()
            if self.interrupted.is_set() and not self.over:
                self.save_checkpoint()
                raise Interrupted
            self.finish()
        finally:
            self.close()

    def check_callbacks(self) -> None:
        """Raise the error of a callback, if one failed in this round; all processes stop then."""
        self.callbacks.check()
        if self.failed_elsewhere:
            raise ProcessLost("a callback failed in another process of this run, so the run stops")

    def agree_on_callbacks(self) -> None:
        """Let all processes do what callbacks asked for in any of them: stop the run, or save a checkpoint."""
        if self.ranks.size > 1:
            asked = [self.stopped, self.checkpoint_wanted, self.callbacks.failure is not None]
            stopped, wanted, failed = zip(*self.ranks.gather_json(asked), strict=True)
            self.stopped = next((why for why in stopped if why is not None), None)
            self.checkpoint_wanted, self.failed_elsewhere = any(wanted), any(failed)

    def owns(self, who: int) -> bool:
        """Tell whether a client belongs to this process."""
        return self.placement.owns(self.number[who])

    @property
    def over(self) -> bool:
        """Tell whether no round is left, because all are done or a callback stopped the run."""
        return self.done >= self.schedule.rounds or self.stopped is not None

    def score(self) -> None:
        """Score the models of the run's last round, including those of unseen clients."""
        self.scores.training(self.done, self.server, self.store)
        self.scores.adapt(self.done, self.server, self.store, last=True)

    def new_scores(self) -> RunScores:
        """Return evaluators that have not scored anything yet."""
        settings = (self.pipeline.malicious, self.schedule.select, self.budgets)
        attack = self.pipeline.adversary.attack
        measure = None if attack is None else attack.success()
        success = None
        if measure is not None:
            success = SuccessCounter(TriggeredSamples(self.federation, measure), self.task)
        return RunScores(self.federation, self.algorithm, self.executor, *settings, self.placement, success)

    def job(self, who: int, held: HeldState | None = None) -> ClientJob:
        """Return the job of a client: in its stored state or in `held`, with what the server would send it now."""
        down = broadcast(self.algorithm, self.server, self.number[who])
        return ClientJob(
            who, self.store.get(who) if held is None else held, down, self.budgets.get(self.federation.names[who])
        )

    def advance(self) -> bool:
        """Run one more round; return False, with nothing changed, if it was interrupted."""
        round = self.done + 1
        began = time.perf_counter()
        self.client_seconds.clear()
        before = self.server, copy.deepcopy(self.counters), self.stopped
        snapshot = self.pipeline.snapshot()
        cohort = self.sample(round)
        jobs = [self.job(who) for who in cohort if self.owns(who)]
        asked, solves, sent = len(cohort), [], {}
        own: list[ClientResult] = []
        for exchange in range(exchanges_of(self.algorithm)):
            if exchange:
                jobs = [self.job(r.who, r.held) for r in own]
            results = list(self.executor.train(round, jobs, self.interrupted.is_set))
            if self.pipeline.settings.privacy is not None:
                results = [
                    self.privacy.released(round, exchange, job, result, self.federation.names[job.who], self.store)
                    for job, result in zip(jobs, results, strict=False)
                ]
            facts = share_facts(self.placement, jobs, results, self.interrupted.is_set())
            if facts.interrupted:
                self.interrupted.set()
                self.server, self.counters, self.stopped = before
                self.pipeline.rollback(snapshot)
                return False
            accepted = self._accept(round, facts, results)
            kept = {fact.who for fact in accepted}
            own = [result for result in results if result.who in kept]
            device = self.task.w0.device
            uploads = accepted_uploads(self.placement, accepted, own, self.number.__getitem__, self.schema.up, device)
            sent = self.aggregate(round, uploads, [self.federation.names[fact.who] for fact in accepted])
            ledger = self.pipeline.ledger
            ledger.adapt(sum(fact.short for fact in accepted), self.draw_noise(ledger.sums, "number"))
            solves += [fact.solves for fact in accepted]
        host = HostStates()
        for result in own:
            kept_of_upload = State(sent.get(self.number[result.who], {})).to(CPU)
            self.store.put(result.who, State(host.of(result.held), **kept_of_upload))
        self.done = round
        trained = time.perf_counter()
        head: dict[str, Any] = {"round": round, "clients": asked, "left_out": asked - len(accepted)}
        head["lr"] = self.learning_rate(round)
        reported = [] if self.private else [fact.diagnostics for fact in accepted]
        rest = self.count_solves(round, *self.task.judge(solves)) | diagnostic_figures(reported) | self.counters.sums()
        line = self._evaluated(head, rest) if self.evaluates(round) else head | rest
        self.callbacks.on_round_end(line, affects_results=True)
        self.agree_on_callbacks()
        if self.stopped is not None and not self.evaluates(round):  # the last round is always evaluated
            line = self._evaluated(head, rest)
        self.scores.adapt(round, self.server, self.store, last=self.over)
        self.counters.seconds += time.perf_counter() - began
        self.log(line, self.timing(round, trained - began, time.perf_counter() - trained))
        self.agree_on_callbacks()  # those that only watch have seen the line now
        due = round % self.schedule.checkpoint_every == 0 or self.checkpoint_wanted
        if due or self.over or self.callbacks.failure is not None or self.failed_elsewhere:
            self.save_checkpoint()
            self.checkpoint_wanted = False
        return True

    def _evaluated(self, head: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        """Score the models of the current round; return its line, with the scores between its two parts."""
        self.scores.training(self.done, self.server, self.store)
        line = head | self.scores.training.board().summary() | rest
        self.callbacks.on_evaluation(line)
        return line

    def releases(self) -> RunReleases:
        return self.privacy.so_far(self.done)

    def draw_noise(self, number: int, purpose: str) -> Noise:
        return seeded_noise(self.schedule.seed, number, purpose)

    def _accept(self, round: int, facts: RoundFacts, own: list[ClientResult]) -> list[ResultFacts]:
        """Return the results with finite numbers; a client whose update is dropped keeps its old state."""
        for result in own:
            shapes = result.upload.wire.shapes()
            if shapes != self.schema.up:
                raise TypeError(f"{type(self.algorithm).__name__} announced {self.schema.up}, sent {shapes}")
        self.counters.bytes_down += facts.bytes_down
        for fact in facts.results:
            name = self.federation.names[fact.who]
            self.counters.bytes_up += fact.bytes_up
            self.counters.gradient_samples += fact.gradient_samples
            if fact.seconds is not None:
                self.client_seconds[name] += fact.seconds
            if self.pipeline.settings.privacy is not None:
                self.pipeline.ledger.released[name] += 1
        dropped = [fact for fact in facts.results if not fact.finite]
        if dropped:
            self._report_dropped(round, dropped, len(facts.results))
        return [fact for fact in facts.results if fact.finite]

    def _report_dropped(self, round: int, dropped: list[ResultFacts], asked: int) -> None:
        """Count updates that are not finite, and report them in one sentence; if all are, the run fails."""
        self.counters.left_out += len(dropped)
        _, complaint = self.task.judge(result.solves for result in dropped)
        if len(dropped) == asked:
            why = f" ({complaint})" if complaint else ""
            raise RunFailed(self.failure(round, f"every client's update has NaN or infinite numbers{why}"))
        names = [self.federation.names[result.who] for result in dropped]
        more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        what = (
            f"the update of {names[0]} has NaN or infinite numbers and was left out"
            if len(names) == 1
            else f"{len(names)} of {asked} updates have NaN or infinite numbers and were left out: "
            f"{', '.join(names[:_NAMED])}{more}"
        )
        self.callbacks.on_message(f"round {round}: {what}" + (f"; {complaint}" if complaint else ""))

    def training_clients(self) -> list[str]:
        return [self.federation.names[who] for who in self.training]

    def client_name(self, number: int) -> str:
        return self.federation.names[self.by_number[number]]

    def no_validation(self) -> str:
        for part in ("validation", "test"):  # figures over clients exist only where there are test samples too
            if not getattr(self.federation, part).lengths[self.training].any():
                return f"no client has {part} samples; add a {part} part to data.split"
        return ""

    def validation_scores(self, kind: str) -> dict[str, float]:
        board = self.scores.training.board()
        table = board.tables()[kind]
        column = COLUMNS.index("validation_metric")
        return {self.federation.names[who]: float(table[who, column]) for who in np.flatnonzero(board.validates)}

    def no_personal_models(self) -> str:
        return ""

    def personal_models(self, clients: Sequence[str]) -> Iterator[ClientModel]:
        numbers = {self.federation.names[who]: who for who in self.training}
        if unknown := [name for name in clients if name not in numbers]:
            raise EquipoiseError(f"there is no client {unknown[0]!r} that trains; they are {', '.join(numbers)}")
        wanted = [self._own_client(numbers[name]) for name in clients]
        for some in self.executor.shards.portions(wanted, self.number.__getitem__, AT_ONCE):
            jobs = [self.job(who) for who in some]
            for model, _ in self.executor.models(self.done, jobs, "personal"):
                if model is None:
                    raise EquipoiseError(f"{type(self.algorithm).__name__} has no personal models")
                yield model

    def own_clients(self, clients: Sequence[str]) -> list[str]:
        numbers = {name: who for who, name in enumerate(self.federation.names)}
        return [name for name in clients if self.owns(numbers[name])]

    def _own_client(self, who: int) -> int:
        if not self.owns(who):
            raise EquipoiseError(
                f"the model of {self.federation.names[who]!r} is in another process of this run; models of all clients "
                "are in the run folder when the run is over"
            )
        return who

    def module_of(self, model: ClientModel) -> nn.Module:
        module = super().module_of(model)
        return self.executor.predictor(module, model.who) if model.looks_up else module

    def models_made_alone(self, clients: Sequence[int], kind: ModelKind) -> Iterator[ClientModel | None]:
        """Yield the models of clients that all trained ("personal"), or all did not ("unseen"), as if made alone."""
        executor = self.new_executor()
        return models_made_alone(executor, self.done, clients, kind, self.job)

    def global_module(self, who: int) -> nn.Module | None:
        """Return the global model as a client uses it, with its own BatchNorm statistics if they are not averaged."""
        vector, buffers = self.algorithm.global_model(self.server), self.global_buffers()
        if buffers is None and len(self.task.buffers):
            if who not in self.training:
                return None
            buffers = self.store.get(who).get(BUFFERS)
        return None if vector is None else self.task.to_module(vector, buffers)

    def forecasts(self) -> ForecastScores | None:
        """Return the scores of the run's forecasts as it is, or None if its data are no time series."""
        if self.federation.series is None:
            return None
        if self._forecasts is None or self._forecasts[0] != self.done:
            models = self.models_made_alone, self.global_module, self.module_of
            self._forecasts = self.done, score_forecasts(self.task, self.federation, *models, self.pipeline.malicious)
        return self._forecasts[1]

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the run as it is."""
        self.save(self.scores.tensors())

    def facts(self) -> dict[str, Any]:
        return {"scores": self.scores.facts()}

    def restored(self, saved: Checkpoint) -> None:
        self.scores_missing = not self.scores.restore(saved.facts["scores"], saved.kept)

    def finish(self) -> None:
        """Write the results into the run folder, and report the end of the run."""
        if self.folder is None or not self.ranks.leader:
            self.report_end(self.summary())
            return
        # States of other processes' clients are read from the last checkpoint.
        self.best.write(self.folder.path, {name: who for who, name in enumerate(self.federation.names)})
        self.report_end(self.write_results(self.folder))

    def write_results(self, folder: RunFolder) -> dict[str, Any]:
        """Write the results of the run as it is into a folder, and return its summary."""
        shown = shown_states(self.algorithm, self.start, map(self.job, sorted(self.training)))
        tables, columns = self.scores.tables(), score_columns(self.task.metrics)
        summary = self.summary() | sharing_figures(shown, self.federation)
        if (forecasts := self.forecasts()) is not None:
            folder.write_table(folder.forecasts, forecasts.columns, forecasts.table())
        write_results(folder, self.federation, self.pipeline.malicious, tables, columns, shown, summary)
        return summary

    def summary(self) -> dict[str, Any]:
        """Return what summary.json contains."""
        adapted = self.scores.training.adaptation_samples
        forecasts = self.forecasts()
        figures = {"forecast": forecasts.summary()} if forecasts else {}
        scores = self.scores.summary() | figures
        return summarize_run(self, self.federation.title, len(self.training), scores, adapted)
