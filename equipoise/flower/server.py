"""The server of a deployment: the same rounds as in the simulator, with clients that come, go and may fail.

An exchange is one order to each client that is asked, and its reply. The first exchange of round k trains its cohort
and, in the same orders, has all clients score the models of round k - 1, because both need the same broadcast. The last
exchange of the run only scores. A round therefore costs no more exchanges than its algorithm needs, usually one.

If a callback stops the run because of the scores of round k - 1, the updates of round k have already arrived. They are
dropped, so that the run ends with the models that were scored.
"""

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from flwr.serverapp import Grid

from equipoise.algorithms.capabilities import HasConsensusModel, exchanges_of
from equipoise.algorithms.local_data import Start
from equipoise.callbacks.callback_list import CallbackList
from equipoise.distributed.placement import Placement
from equipoise.distributed.shards import ClientShards
from equipoise.engine.best_models import BestModels
from equipoise.engine.checkpoint import Checkpoint
from equipoise.engine.client_store import ClientStore
from equipoise.engine.model_files import write_model
from equipoise.engine.run import Run
from equipoise.engine.run_context import EngineContext
from equipoise.engine.shared_buffers import initial_server
from equipoise.engine.summary import summarize_run
from equipoise.equilibrium import Solves
from equipoise.errors import EquipoiseError, RunFailed
from equipoise.executors.base import SENT, ClientModel
from equipoise.flower.attendance import Attendance, TooFewClients
from equipoise.flower.codec import RejectedMessage, group
from equipoise.flower.deployment_plan import DeploymentPlan
from equipoise.flower.enrolment import Enrolment
from equipoise.flower.exchange import Exchange
from equipoise.flower.orders import Assignment, OrderContext, build_order
from equipoise.flower.protocol import answer_shapes, reported_solves
from equipoise.flower.reported_scores import ReportedScores
from equipoise.flower.roster import Member, Roster
from equipoise.flower.round_progress import RoundProgress
from equipoise.flower.transport import Reply, Transport
from equipoise.flower.upload_checks import Received, UploadChecks
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import Noise, secure_noise
from equipoise.state import RoundUploads, State, Upload
from equipoise.storage import atomic_files
from equipoise.storage.model_kinds import COLUMNS, SCORED
from equipoise.storage.run_folder import RunFolder
from equipoise.training.buffers import BUFFERS, broadcast

_RESUME = "See the clients' logs, then resume with resume=true"
_WAIT_LONGER = "See the SuperNodes' logs, or wait longer"
Accepted = tuple[Member, Upload]


class Deployment(Run):
    """The server's side of a run with real clients."""

    def __init__(self, plan: DeploymentPlan, grid: Grid, folder: RunFolder, callbacks: CallbackList | None = None):
        self.plan, self.settings = plan, plan.experiment.deploy
        task, experiment = plan.task(), plan.experiment
        start = task.start(self.settings.clients, seed=experiment.schedule.seed)
        settings = experiment.algorithm, experiment.schedule
        super().__init__(task, *settings, start, folder, callbacks, experiment.uploads, experiment.devices)
        self.buffers = task.buffers
        # Clients keep their states themselves; the server may have to keep their last uploads.
        initial = State() if self.pipeline.last is None else self.pipeline.last.initial
        self.store = ClientStore(0, initial, folder.checkpoint, experiment.engine.memory_mb << 20)
        self.best = BestModels(task, 0, folder.checkpoint, experiment.engine.memory_mb << 20)
        kinds = [kind for kind in SCORED if kind != "consensus" or isinstance(self.algorithm, HasConsensusModel)]
        self.transport = Transport(grid, answer_shapes(self.schema, task.metrics, kinds), self.report)
        self.roster = Roster(self.settings.names)
        needs_size = self.algorithm.requires.total_samples or self.schema.weighs_samples
        largest = self.settings.largest_weight
        self.enrolment = Enrolment(
            self.transport, self.roster, self.fingerprint, self.report, largest, bool(needs_size)
        )
        self.checks = UploadChecks(self.schema, self.settings, experiment.privacy)
        self.attendance = Attendance(self.transport, self.enrolment, self.settings, self.schedule, self.report)
        self.id = self.attendance.run = uuid.uuid4().hex
        labels = task.sample[1][0].numel()
        self.scores = ReportedScores(task.metrics, experiment.schedule.select, labels, task.loss.least, largest)
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
        scores = ["scores", *(["confusion matrices"] if task.metrics.arrays else [])] if self.settings.evaluate else []
        not_covered = [*scores, "numbers of samples", "failures to train"]
        self.plan_privacy(ReleaseCount(self.schedule.rounds, exchanges_of(self.algorithm)), not_covered)

    @property
    def mode(self) -> str:
        return "flower"

    @cached_property
    def fingerprint(self) -> str:
        return self.task.space.fingerprint()

    def draw_noise(self, number: int, purpose: str) -> Noise:
        """Return noise that nobody can predict: it must not depend on the run's seed, which everybody knows."""
        return secure_noise()

    def releases(self) -> ReleaseCount:
        """Count every order to train, whether or not its reply was used; participation is not secret here."""
        privacy, ledger = self.pipeline.settings.privacy, self.pipeline.ledger
        assert privacy is not None
        most = ledger.sums if privacy.central else max(ledger.released.values(), default=0)
        exchanges = exchanges_of(self.algorithm)
        return ReleaseCount(-(-most // exchanges), exchanges)

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

    def run(self) -> None:
        """Wait for clients, do the remaining rounds, and write the results."""
        self.callbacks.on_run_begin(EngineContext(self))
        self.note("begin", rounds=self.schedule.rounds)
        wanted, wait = self.settings.clients, self.settings.wait
        if self._unfinished:
            self.starts += 1
            self.save_checkpoint()  # before any client learns the run's id or gets an order of this start
            self.report("waiting", f"waiting for {wanted} clients, at most {wait:g} seconds")
            try:
                self.attendance.gather(self.done + 1, wanted, wait)
            except TooFewClients as error:
                raise RunFailed(self.failure(self.done + 1, str(error), _WAIT_LONGER)) from None
            if self.done == 0 and not self.step:
                self.roster.renumber()
                self._settle()
        while self._unfinished:
            began = time.perf_counter()
            if self._trains:
                self._exchange()
            else:
                self._conclude()
            self.counters.seconds += time.perf_counter() - began
            self.save_checkpoint()
            self.callbacks.check()
        self._finish()

    @property
    def _trains(self) -> bool:
        """Tell whether there is a next round."""
        return self.stopped is None and self.done < self.schedule.rounds

    @property
    def _unfinished(self) -> bool:
        """Tell whether an exchange is left: of a round, or the last one, which only scores."""
        return self._trains or self.unlogged is not None or (self.stopped is not None and not self.concluded)

    def _settle(self) -> None:
        """Fix, before the first round, what depends on who is here."""
        training = [member for member in self.roster.members.values() if not member.unseen]
        samples = sum(member.samples for member in training)
        self._report_heavy(training, samples)
        self._begin(replace(self.start, clients=len(training), samples=samples))
        unseen = {member.name for member in self.roster.members.values() if member.unseen}
        names = ({member.name for member in training} | set(self.settings.names)) - unseen
        self.budgets = self.devices.budgets(sorted(names), self.schedule.seed)
        if (attack := self.pipeline.settings.attack) is not None:
            names |= set(attack.clients) - unseen
            self._set_malicious(attack.malicious(sorted(names), self.schedule.seed))

    def _report_heavy(self, training: list[Member], samples: int) -> None:
        """Report a client that announces more than half of all samples, because it then outweighs all others."""
        for member in training:
            if len(training) > 2 and self.schema.weighs_samples and member.samples > samples / 2:
                share = f"{member.samples} of all {samples} samples"
                self.warn(f"{member.name} announces {share}, so its weight is larger than that of all others together")

    def _set_malicious(self, names: frozenset[str]) -> None:
        self.pipeline.malicious = self.scores.malicious = names

    def _begin(self, start: Start) -> None:
        """Set what all clients begin with, and how many there are."""
        self.start = start
        if not self.done and not self.step:
            self.server = initial_server(self.task, self.algorithm, start, self.private)
        shared = initial_server(self.task, self.algorithm, start, self.private).get(BUFFERS)
        self.pipeline.begin(start, shared)
        if self.pipeline.last is not None:
            self.store.initial = self.pipeline.last.initial

    def _refresh(self) -> None:
        try:
            self.attendance.refresh(self.done + 1)
        except TooFewClients as error:
            raise RunFailed(self.failure(self.done + 1, str(error), _WAIT_LONGER)) from None

    def _exchange(self) -> None:
        """Do one exchange of a round, and with the first one score the round before."""
        round = self.done + 1
        self.scores.clear()
        for attempt in range(self.settings.attempts):
            began = time.perf_counter()
            self._refresh()
            if self.step:
                cohort = self.attendance.remaining(round, self.progress.participants)
            else:
                cohort = self.attendance.sample(round)
            members = {member.name: member for member in cohort}
            if self.unlogged is not None:
                members |= {member.name: member for member in self.enrolment.present()}
            exchange = self._ask(round, cohort, members.values())
            self._take_scores(exchange.replies, self.done if self.unlogged is not None else 0)
            accepted = self._accept(round, cohort, exchange.replies)
            if len(accepted) >= self.settings.minimum:
                self._log_scores()
                if self.stopped is not None:
                    self.client_seconds.clear()
                    return
                self._aggregate(round, cohort, accepted, exchange.number, time.perf_counter() - began)
                return
            again = "; asking again" if attempt + 1 < self.settings.attempts else ""
            found = f"{len(accepted)} of {len(cohort)} updates could be used, and {self.settings.minimum} are needed"
            self.report("too few", f"round {round}: {found}{again}")
        if self.step and self.progress.restarts < self.settings.attempts:
            self._restart_round(round)
            return
        advice = f"{_RESUME}{self.way_back()}"
        raise RunFailed(self.failure(round, f"too few updates, {self.settings.attempts} times", advice))

    def _restart_round(self, round: int) -> None:
        """Start a round again with other clients, because too few are left; all go back to their state before it."""
        left = len(self.progress.participants)
        self.report("abandoned", f"round {round} starts again: too few of its {left} clients are left")
        self.server, self.progress = self.progress.server_before, self.progress.restarted()
        self._end_round()

    def _end_round(self) -> None:
        self.step = 0
        for member in self.roster.members.values():
            member.within = 0

    def _conclude(self) -> None:
        """Do the last exchange: all clients score the models of the last round, and write their own to a file."""
        self.scores.clear()
        finished: set[str] = set()
        silent: set[str] | None = None
        for _ in range(self.settings.attempts):
            self._refresh()
            members = [*self.enrolment.present(), *self.enrolment.present(unseen=True)]
            if silent is not None:  # a client that refused would refuse again
                members = [member for member in members if member.name in silent]
            exchange = self._ask(self.done + 1, [], members, last=True)
            self._take_scores(exchange.replies, self.done)
            finished |= exchange.replies.keys()
            if not (silent := exchange.silent):
                break
        if not finished:
            raise RunFailed(self.failure(self.done, "no client could be asked for its last scores", _RESUME))
        self._log_scores()
        self.concluded = True

    def _ask(self, round: int, cohort: list[Member], members: Iterable[Member], last: bool = False) -> Exchange:
        """Send the orders of an exchange, and wait for the replies until all are there or time is up."""
        self.orders += 1
        exchange = Exchange(self.starts << 32 | self.orders, round, self.transport, self.enrolment, self.report)
        scoring = self.done if self.unlogged is not None or last else 0
        members = list(members)
        if self.pipeline.settings.privacy is not None and cohort:
            self.pipeline.ledger.released.update(member.name for member in cohort)
            self.save_checkpoint()  # before any client can release anything
        global_model = self.algorithm.global_model(self.server) if scoring else None
        context = OrderContext(
            self.id, self.start.clients, self.start.samples, self.start.w0, self.buffers, bool(self.schema.client)
        )
        for member in members:
            train = round if member in cohort else 0
            down = broadcast(self.algorithm, self.server, member.index)
            order, tensors = build_order(
                context,
                member,
                Assignment(exchange.number, round, train, scoring, last),
                down,
                global_model,
                malicious=member.name in self.pipeline.malicious,
                iterations=self.budgets.get(member.name, 0),
            )
            self.transport.send(member.node, member.name, order, tensors, self.attendance.lifetime)
            if train:
                self.counters.bytes_down += down.nbytes
        names = (member.name for member in members)
        exchange.wait(names, self.settings.deadline, self.attendance.greet)
        return exchange

    def _accept(self, round: int, cohort: list[Member], replies: dict[str, Reply]) -> list[Accepted]:
        """Return the updates that can be used, in the order of the clients' names."""
        accepted = []
        if not self.step:
            self.progress.solves = Solves()
        received = [
            Received(member, replies[member.name], self._known(member)) for member in cohort if member.name in replies
        ]
        usable, rejected = self.checks.check(received, round, self.step, self.pipeline.ledger.sigma)
        for each in received:
            name, reply = each.member.name, each.reply
            self.counters.bytes_up += group(reply.tensors, "up").nbytes
            if name in rejected:
                self.transport.refuse(rejected[name].reason, name, str(rejected[name]))
                continue
            accepted.append((each.member, usable[name]))
            self.counters.gradient_samples += reply.answer.samples
            each.member.counts = reply.answer.counts is not False
            self.client_seconds[name] += reply.seconds
            self.progress.solves.add(reported_solves(reply.answer))
        return accepted

    def _known(self, member: Member) -> list[State]:
        """Return the messages that the server and a client both have before the client's upload."""
        down = broadcast(self.algorithm, self.server, member.index)
        if self.pipeline.last is None:
            return [down]
        return [down, State({k: t for k, t in self.store.get(member.index).items() if k.startswith(SENT)})]

    def _aggregate(
        self, round: int, cohort: list[Member], accepted: list[Accepted], number: int, seconds: float
    ) -> None:
        progress = self.progress
        if not self.step:
            progress.server_before, progress.asked = self.server, len(cohort)
        # In the order in which a simulation sums, so that the two agree to the last digit where they can.
        placement = Placement(ClientShards(self.start.clients))
        who, sent = tuple(member.index for member, _ in accepted), tuple(upload for _, upload in accepted)
        uploads = RoundUploads(who, sent, placement)
        for client, kept in self.aggregate(round, uploads, [member.name for member, _ in accepted]).items():
            self.store.put(client, kept)
        for member, _ in accepted:
            member.within = number
        self.step += 1
        progress.participants = tuple(member.name for member, _ in accepted)
        progress.seconds += seconds
        if self.step < exchanges_of(self.algorithm):
            return
        for member, _ in accepted:
            member.accepted = number
        self._end_round()
        left_out = progress.asked - len(accepted)
        self.counters.left_out += left_out
        self.done, self.concluded = round, False
        line: dict[str, Any] = {"round": round, "clients": progress.asked, "left_out": left_out}
        line["lr"] = self.learning_rate(round)
        line |= self.count_solves(round, progress.solves)
        timing = self.timing(round, progress.seconds, 0.0)
        self.progress = RoundProgress()
        line |= self.counters.sums()
        scored = round == self.schedule.rounds or (self.settings.evaluate and self.evaluates(round))
        self.round_ended = not scored
        if not scored:
            self.callbacks.on_round_end(line, affects_results=True)
        if scored or self.stopped is not None:
            self.unlogged = line, timing  # its models are scored in the next exchange
        else:
            self.log(line, timing)

    def _take_scores(self, replies: dict[str, Reply], round: int) -> None:
        """Take the scores of the models of a round; 0 if none were asked for."""
        for name, reply in replies.items():
            if not round or reply.answer.evaluated != round:
                continue
            try:
                unseen = self.roster.members[name].unseen
                scores, confusion = group(reply.tensors, "scores"), group(reply.tensors, "confusion")
                self.scores.add(name, scores, confusion, reply.answer.adapted, unseen)
            except RejectedMessage as error:
                self.transport.refuse(error.reason, name, str(error))

    def _log_scores(self) -> None:
        """Write the lines of the round before, with its scores."""
        if self.unlogged is not None:
            line, timing = self.unlogged
            head = {k: line[k] for k in ("round", "clients", "left_out", "lr") if k in line}
            whole = head | self.scores.board().summary() | line
            self.unlogged = None
            self.callbacks.on_evaluation(whole)
            if not self.round_ended:
                self.callbacks.on_round_end(whole, affects_results=True)
            self.log(whole, timing)

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
        self.best.write(self.folder.path, {})
        vector = self.algorithm.global_model(self.server)
        if vector is not None and (BUFFERS in self.server or not self.task.buffer_names):
            module = self.task.to_module(vector, self.global_buffers())
            write_model(self.folder.path / "global.safetensors", module, *self.plan.described(), "global")
        summary = self.summary()
        atomic_files.write_json(self.folder.summary, summary)
        self.report_end(summary)
        self.note("finished")

    def report_stop(self, text: str) -> None:
        super().report_stop(text)
        self.note("stopped", text=text)
