"""The server of a deployment: the same rounds as in the simulator, over clients that come, go and may err.

An exchange is one order to each client that is asked, and its answer. The first exchange of round k trains with its
cohort and, in the same order, has the models of round k - 1 scored by all: both need the same message down. The last
exchange of the run only scores. So a round costs no exchange more than its algorithm asks for, which mostly is one.
"""

import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid

from equipoise import randomness
from equipoise.algorithms.capabilities import HasConsensusModel, exchanges_of, initial_upload_of
from equipoise.algorithms.local_data import Start
from equipoise.callbacks.base import RunCallback
from equipoise.engine.aggregation_pipeline import AggregationPipeline
from equipoise.engine.checkpoint import Checkpoint
from equipoise.engine.client_store import ClientStore
from equipoise.engine.last_uploads import LastUploadTracker
from equipoise.engine.model_files import write_model
from equipoise.engine.run import Run
from equipoise.equilibrium import Solves
from equipoise.errors import RunFailed
from equipoise.flower.codec import RejectedMessage, group, named
from equipoise.flower.deployment_plan import DeploymentPlan
from equipoise.flower.enrolment import Enrolment
from equipoise.flower.exchange import Exchange
from equipoise.flower.protocol import Order, answer_shapes, reported_solves
from equipoise.flower.reported_scores import ReportedScores
from equipoise.flower.roster import Member, Roster
from equipoise.flower.transport import Reply, Transport
from equipoise.flower.upload_checks import checked_upload
from equipoise.model_kinds import SCORED
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import Noise, secure_noise
from equipoise.state import State, Upload, Uploads
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import RunFolder

_RESUME = "Look into the clients' logs, then go on with resume=true"
Accepted = tuple[Member, Upload]


class Deployment(Run):
    """The server's side of a run over real clients."""

    def __init__(self, plan: DeploymentPlan, grid: Grid, folder: RunFolder, watcher: RunCallback | None = None):
        self.plan, self.settings = plan, plan.experiment.deploy
        task, experiment = plan.task(), plan.experiment
        start = task.start(self.settings.clients, seed=experiment.schedule.seed)
        pipeline = AggregationPipeline.of(experiment)
        settings = experiment.algorithm, experiment.schedule
        super().__init__(task, *settings, start, folder, watcher, pipeline, experiment.devices)
        self.buffers = task.buffers
        # Clients keep their states themselves; the server may have to keep their last messages.
        kept = State() if self.last is None else self.last.initial
        self.store = ClientStore(0, kept, folder.checkpoint, experiment.engine.memory_mb << 20)
        kinds = [kind for kind in SCORED if kind != "consensus" or isinstance(self.algorithm, HasConsensusModel)]
        self.post = Transport(grid, answer_shapes(self.announced, kinds), self.tell)
        self.roster = Roster(self.settings.names)
        self.id = uuid.uuid4().hex
        self.tally = ReportedScores(task.metric, experiment.schedule.select)
        self.solves = Solves()
        "the solves of equilibrium layers in the round at hand"
        self.seconds = 0.0
        "that it has taken"
        self.unlogged: tuple[dict[str, Any], dict[str, Any]] | None = None
        "the line of a round whose models are still to be scored"
        self.begun: tuple[str, ...] = ()
        "who is in the round at hand, once some but not all of its exchanges are done"
        self.asked, self.abandoned = 0, 0
        "how many clients its first exchange asked, and how often it was begun anew"
        self.before = State()
        "the server's state before it"
        self.starts, self.orders = 0, 0
        "of the server in this run, and of orders in this start: together they number an order"
        self.door = Enrolment(self.post, self.roster, self.fingerprint, self.tell)
        scores = ["scores"] if self.settings.evaluate else []
        uncovered = [*scores, "numbers of samples", "failures to train"]
        self.find_noise(ReleaseCount(self.schedule.rounds, exchanges_of(self.algorithm)), uncovered)

    def randomness(self, number: int, of: str) -> Noise:
        """Nobody's to foresee: not drawn from the run's seed, which all know."""
        return secure_noise()

    def releases(self) -> ReleaseCount:
        """Every order to train counts, whether its answer was used or not; who takes part is no secret here."""
        assert self.between.privacy is not None
        most = self.sums if self.between.privacy.central else max(self.released.values(), default=0)
        return ReleaseCount(-(-most // exchanges_of(self.algorithm)), exchanges_of(self.algorithm))

    @property
    def mode(self) -> str:
        return "flower"

    @property
    def _lifetime(self) -> float:
        """Seconds for which Flower keeps an order: long enough that a late answer is seen, and clocks may differ."""
        return 2 * self.settings.deadline + 600

    @cached_property
    def fingerprint(self) -> str:
        return self.task.space.fingerprint()

    def tell(self, event: str, text: str) -> None:
        """For the operator: shown, and kept in events.jsonl."""
        self.watcher.tell(text)
        self.note(event, text=text)

    def warn(self, text: str) -> None:
        self.tell("warning", text)

    def note(self, event: str, **facts: Any) -> None:
        assert self.folder is not None
        self.folder.append(self.folder.events, {"round": self.done, "event": event, **facts})

    def run(self) -> None:
        self.watcher.begin(self.schedule.rounds, self.done)
        self.note("begin", rounds=self.schedule.rounds)
        wanted, wait = self.settings.clients, self.settings.wait
        if self.done < self.schedule.rounds or self.unlogged is not None:
            self.starts += 1
            self._save()  # before anybody is told this run's name, or gets an order of this start
            self.tell("waiting", f"waiting for {wanted} clients, at most {wait:g} seconds")
            self._gather(wanted, wait)
            if self.done == 0 and not self.step:
                self.roster.renumber()
                self._settle()
        while self.done < self.schedule.rounds or self.unlogged is not None:
            began = time.perf_counter()
            if self.done < self.schedule.rounds:
                self._exchange()
            else:
                self._conclude()
            self.counters.seconds += time.perf_counter() - began
            self._save()
        self._finish()

    def _settle(self) -> None:
        """Before the first round: what follows from who is here."""
        training = [member for member in self.roster.members.values() if not member.unseen]
        samples = sum(member.samples for member in training)
        self._begin(replace(self.start, clients=len(training), samples=samples))
        unseen = {member.name for member in self.roster.members.values() if member.unseen}
        names = ({member.name for member in training} | set(self.settings.names)) - unseen
        self.budgets = self.devices.budgets(sorted(names), self.schedule.seed)
        if (attack := self.between.attack) is not None:
            names |= set(attack.clients) - unseen
            self.malicious = self.tally.malicious = attack.malicious(sorted(names), self.schedule.seed)

    def _begin(self, start: Start) -> None:
        """What all clients begin with, and how many there are."""
        self.start = start
        if not self.done and not self.step:
            self.server = self.algorithm.init_server(start)
        if (first := initial_upload_of(self.algorithm, start)) is not None:
            self.last = LastUploadTracker(first, start.clients)
            self.store.initial = self.last.initial

    def _gather(self, wanted: int, seconds: float) -> None:
        """Wait until this many clients are here, and go on with fewer if they are enough for a round."""
        until = time.monotonic() + seconds
        while len(self.door.present()) < wanted and time.monotonic() < until:
            self._greet()
            Exchange(0, self.done + 1, self.post, self.door, self.tell).look()
            self.post.pause()
        here, needed = len(self.door.present()), self.settings.minimum
        if here < needed:
            what = f"{here} clients came within {seconds:g} seconds, and a round needs {needed}"
            raise RunFailed(self.hopeless(self.done + 1, what, "Look into the SuperNodes' logs, or wait longer"))
        if here < wanted:
            self.tell("waiting", f"only {here} of {wanted} clients came; going on with them")

    def _greet(self) -> None:
        self.door.greet(self.id, self.settings.deadline, self._lifetime)

    def sample(self, round: int) -> list[Member]:
        """Who takes part, drawn from those who are here, in the order of their names."""
        present = self.door.present()
        if not present:
            return []
        wanted = self.schedule.participation
        cohort = min(wanted, len(present)) if isinstance(wanted, int) else self.schedule.cohort(len(present))
        rng = randomness.generator(self.schedule.seed, "participation", round)
        return [present[rank] for rank in np.sort(rng.choice(len(present), cohort, replace=False))]

    def _exchange(self) -> None:
        """One more exchange of a round, and with its first the scores of the one before."""
        round = self.done + 1
        self.tally.clear()
        for attempt in range(self.settings.attempts):
            began = time.perf_counter()
            self._ready()
            cohort = self._cohort(round)
            members = {member.name: member for member in cohort}
            if self.unlogged is not None:
                members |= {member.name: member for member in self.door.present()}
            exchange = self._ask(round, cohort, members.values())
            self._take_scores(exchange.answers)
            accepted = self._accept(round, cohort, exchange.answers)
            if len(accepted) >= self.settings.minimum:
                self._log_scores()
                self._aggregate(round, cohort, accepted, exchange.number, time.perf_counter() - began)
                return
            again = "; asking again" if attempt + 1 < self.settings.attempts else ""
            found = f"{len(accepted)} of {len(cohort)} updates could be used, and {self.settings.minimum} are needed"
            self.tell("too few", f"round {round}: {found}{again}")
        if self.step and self.abandoned < self.settings.attempts:
            self._abandon(round)
            return
        raise RunFailed(self.hopeless(round, f"too few updates, {self.settings.attempts} times", _RESUME))

    def _abandon(self, round: int) -> None:
        """A round that too few are left of begins anew, with others: everybody goes back to before it."""
        self.abandoned += 1
        self.tell("abandoned", f"round {round} is begun anew: too few of its {len(self.begun)} clients are left")
        self.server, self.before = self.before, State()
        self._end_round()

    def _end_round(self) -> None:
        self.step, self.begun = 0, ()
        for member in self.roster.members.values():
            member.within = 0

    def _cohort(self, round: int) -> list[Member]:
        """Who is asked: a sample, or later in a round those of it who are still here."""
        if not self.step:
            return self.sample(round)
        until = time.monotonic() + self.settings.deadline
        while True:
            here = [member for member in self.door.present() if member.name in self.begun]
            if len(here) >= self.settings.minimum or time.monotonic() > until:
                return here
            self._greet()
            Exchange(0, round, self.post, self.door, self.tell).look()
            self.post.pause()

    def _conclude(self) -> None:
        """The last exchange: everybody scores the models of the last round and keeps its own."""
        self.tally.clear()
        finished: set[str] = set()
        silent: set[str] | None = None
        for _ in range(self.settings.attempts):
            self._ready()
            members = [*self.door.present(), *self.door.present(unseen=True)]
            if silent is not None:  # who refused would refuse again
                members = [member for member in members if member.name in silent]
            exchange = self._ask(self.done + 1, [], members, last=True)
            self._take_scores(exchange.answers)
            finished |= exchange.answers.keys()
            if not (silent := exchange.silent):
                break
        if not finished:
            raise RunFailed(self.hopeless(self.done, "no client could be asked for its last scores", _RESUME))
        self._log_scores()

    def _ready(self) -> None:
        """Who is here now; fewer than a round needs are waited for."""
        self.post.online(now=True)
        self._gather(self.settings.minimum, self.settings.deadline)
        self._greet()

    def _ask(self, round: int, cohort: list[Member], members: Iterable[Member], last: bool = False) -> Exchange:
        """Send the orders of an exchange, and wait for the answers until all are there or the time is over."""
        self.orders += 1
        exchange = Exchange(self.starts << 32 | self.orders, round, self.post, self.door, self.tell)
        scoring = self.done if self.unlogged is not None else 0
        members = list(members)
        if self.between.privacy is not None and cohort:
            self.released.update(member.name for member in cohort)
            self._save()  # before anything of it can leave
        for member in members:
            self._order(exchange, member, round if member in cohort else 0, scoring, last)
        exchange.wait((member.name for member in members), self.settings.deadline, self._greet)
        return exchange

    def _order(self, exchange: Exchange, member: Member, train: int, evaluate: int, last: bool) -> None:
        down = self.algorithm.broadcast(self.server, member.index)
        tensors = dict(named(down, "down"))
        shared = self.algorithm.global_model(self.server) if evaluate else None
        name = ""
        if shared is not None:  # most methods send the global model anyway
            name = next((f"down.{k}" for k, t in down.items() if torch.equal(t, shared)), "global")
            tensors |= {"global": shared} if name == "global" else {}
        if not member.accepted and (self.announced.client or len(self.buffers)):
            tensors["start.w0"] = self.start.w0
            tensors |= {"start.buffers": self.buffers} if len(self.buffers) else {}
        order = Order(
            run=self.id,
            number=exchange.number,
            exchange=exchange.round,
            client=member.name,
            clients=self.start.clients,
            samples=self.start.samples,
            malicious=member.name in self.malicious,
            iterations=self.budgets.get(member.name, 0),
            accepted=member.accepted,
            within=member.within,
            train=train,
            evaluate=evaluate,
            finish=last,
            shared=name,
        )
        self.post.send(member.node, member.name, order, tensors, self._lifetime)
        if train:
            self.counters.bytes_down += down.nbytes

    def _accept(self, round: int, cohort: list[Member], answers: dict[str, Reply]) -> list[Accepted]:
        """The updates that can be used, in the order of the clients' names."""
        accepted = []
        if not self.step:
            self.solves = Solves()
        for member in cohort:
            if (answered := answers.get(member.name)) is None:
                continue
            self.counters.bytes_up += group(answered.tensors, "up").nbytes
            try:
                accepted.append((member, checked_upload(answered, round, self.announced)))
                answer = answered.answer
                self.counters.gradient_samples += answer.samples
                self.took[member.name] += answered.seconds
                self.solves.add(reported_solves(answer))
            except RejectedMessage as error:
                self.post.refuse(error.reason, member.name, str(error))
        return accepted

    def _aggregate(
        self, round: int, cohort: list[Member], accepted: list[Accepted], number: int, seconds: float
    ) -> None:
        if not self.step:
            self.before, self.asked = self.server, len(cohort)
        uploads = Uploads(tuple(m.index for m, _ in accepted), tuple(upload for _, upload in accepted))
        for who, sent in self.aggregate(round, uploads, [member.name for member, _ in accepted]).items():
            self.store.put(who, sent)
        for member, _ in accepted:
            member.within = number
        self.step += 1
        self.begun = tuple(member.name for member, _ in accepted)
        self.seconds += seconds
        if self.step < exchanges_of(self.algorithm):
            return
        for member, _ in accepted:
            member.accepted = number
        self._end_round()
        self.abandoned, self.before = 0, State()
        self.counters.left_out += self.asked - len(accepted)
        self.done = round
        line: dict[str, Any] = {"round": round, "clients": self.asked, "left_out": self.asked - len(accepted)}
        line |= self.solved(round, self.solves)
        timing = self.timing(round, self.seconds, 0.0)
        self.seconds = 0.0
        if round == self.schedule.rounds or (self.settings.evaluate and self.evaluates(round)):
            self.unlogged = line | self.counters.sums(), timing  # its models are scored with the next exchange
        else:
            self.log(line | self.counters.sums(), timing)

    def _take_scores(self, answers: dict[str, Reply]) -> None:
        for name, answered in answers.items():
            if self.unlogged is None or answered.answer.evaluated != self.unlogged[0]["round"]:
                continue
            try:
                unseen = self.roster.members[name].unseen
                self.tally.add(name, group(answered.tensors, "scores"), answered.answer.adapted, unseen)
            except RejectedMessage as error:
                self.post.refuse(error.reason, name, str(error))

    def _log_scores(self) -> None:
        """The line of the round before, with its scores."""
        if self.unlogged is not None:
            line, timing = self.unlogged
            head = {k: line[k] for k in ("round", "clients", "left_out")}
            self.log(head | self.tally.board().summary() | line, timing)
            self.unlogged = None

    def facts(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "starts": self.starts,
            "roster": self.roster.facts(),
            "refused": dict(self.post.refused),
            "bytes": [self.post.bytes_sent, self.post.bytes_received],
            "clients": self.start.clients,
            "samples": self.start.samples,
            "malicious": sorted(self.malicious),
            "budgets": self.budgets,
            "unlogged": self.unlogged,
            "within": [self.asked, self.begun],
            "tally": self.tally.facts(),
        }

    def restored(self, saved: Checkpoint) -> None:
        facts = saved.facts
        self.id, self.starts = facts["id"], facts["starts"]
        self.tally.restore(facts["tally"])
        self.roster.restore(facts["roster"])
        self.post.refused.update(facts["refused"])
        self.post.bytes_sent, self.post.bytes_received = facts["bytes"]
        self.unlogged = tuple(facts["unlogged"]) if facts["unlogged"] else None
        self.budgets = facts.get("budgets", {})
        self.asked, begun = facts.get("within", (0, ()))
        self.begun = tuple(begun)
        self.before = group(saved.kept, "before")
        self.malicious = self.tally.malicious = frozenset(facts["malicious"])
        self._begin(replace(self.start, w0=saved.kept["w0"], clients=facts["clients"], samples=facts["samples"]))
        self.buffers = saved.kept["buffers"]

    def _save(self) -> None:
        """Every round: a client learns that its update was taken only after that is on the server's disk."""
        self.save(
            {"w0": self.start.w0, "buffers": self.buffers, **named(self.before if self.step else State(), "before")}
        )

    def summary(self) -> dict[str, Any]:
        training = [name for name, member in self.roster.members.items() if not member.unseen]
        return {
            **self.described(self.plan.title, len(training), self.tally.summary(), self.tally.samples()),
            "refused": dict(sorted(self.post.refused.items())),
            "message_bytes_down": self.post.bytes_sent,
            "message_bytes_up": self.post.bytes_received,
        }

    def _finish(self) -> None:
        assert self.folder is not None
        if self.tally.rows:
            self.folder.write_clients(*self.tally.tables())
        vector = self.algorithm.global_model(self.server)
        if vector is not None and not self.task.buffer_names:
            module = self.task.to_module(vector)
            write_model(self.folder.path / "global.safetensors", module, *self.plan.described(), "global")
        summary = self.summary()
        atomic_files.write_json(self.folder.summary, summary)
        self.watcher.end(summary)
        self.note("finished")
