"""The server of a deployment: the same rounds as in the simulator, with clients that come, go and may fail.

An exchange is one order to each client that is asked, and its reply. The first exchange of round k trains its cohort
and, in the same orders, has all clients score the models of round k - 1, because both need the same broadcast. The last
exchange of the run only scores. A round therefore costs no more exchanges than its algorithm needs, usually one.

If a callback stops the run because of the scores of round k - 1, the updates of round k have already arrived. They are
dropped, so that the run ends with the models that were scored.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from equipoise.algorithms.capabilities import exchanges_of
from equipoise.distributed.placement import Placement
from equipoise.distributed.shards import ClientShards
from equipoise.engine.counters import diagnostic_figures
from equipoise.engine.run_context import EngineContext
from equipoise.equilibrium import Solves, layers
from equipoise.errors import RunFailed
from equipoise.executors.base import SENT
from equipoise.flower.attendance import TooFewClients
from equipoise.flower.codec import RejectedMessage, group
from equipoise.flower.exchange import Exchange
from equipoise.flower.orders import Assignment, OrderContext, build_order
from equipoise.flower.protocol import FORECASTS, SUCCESS_COUNTS, reported_solves
from equipoise.flower.roster import Member
from equipoise.flower.round_progress import RoundProgress
from equipoise.flower.server_state import DeploymentState
from equipoise.flower.transport import Reply
from equipoise.flower.upload_checks import Received
from equipoise.state import RoundUploads, State, Upload
from equipoise.storage.diagnostics import DIAGNOSTICS
from equipoise.training.buffers import broadcast

_RESUME = "See the clients' logs, then resume with resume=true"
_NO_BUDGET = (
    "Clients have no privacy budget left; their owners can allow more with max_releases or max_epsilon in client.toml, "
    "then resume with resume=true"
)
_WAIT_LONGER = "See the SuperNodes' logs, or wait longer"
Accepted = tuple[Member, Upload]


class Deployment(DeploymentState):
    """The rounds of a run with real clients."""

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
        self._begin(replace(self.start, clients=len(training), samples=samples))
        unseen = {member.name for member in self.roster.members.values() if member.unseen}
        names = ({member.name for member in training} | set(self.settings.names)) - unseen
        self.budgets = self.devices.budgets(sorted(names), self.schedule.seed)
        if (attack := self.pipeline.settings.attack) is not None:
            names |= set(attack.clients) - unseen
            self._set_malicious(attack.malicious(sorted(names), self.schedule.seed))

    def _refresh(self) -> None:
        try:
            self.attendance.refresh(self.done + 1)
        except TooFewClients as error:
            raise RunFailed(self.failure(self.done + 1, str(error), _WAIT_LONGER)) from None

    def _exchange(self) -> None:
        """Do one exchange of a round, and with the first one score the round before."""
        round = self.done + 1
        self.scores.clear()
        used_up = self.transport.refused["no-budget"]
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
        if self.transport.refused["no-budget"] > used_up:  # going back would cost them even more
            advice = _NO_BUDGET
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
            self._take_scores(exchange.replies, self.done, last=True)
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
        places = self.pipeline.adversary.places
        for member in members:
            train = round if member in cohort else 0
            down = broadcast(self.algorithm, self.server, member.index)
            order, tensors = build_order(
                context,
                member,
                Assignment(exchange.number, round, train, scoring, last),
                down,
                global_model,
                place=places.get(member.name),
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
        self.progress.diagnostics = []
        if not self.step:
            self.progress.solves = Solves()
        received = [
            Received(
                member,
                replies[member.name],
                broadcast(self.algorithm, self.server, member.index),
                self._last_upload(member),
                self._iterations(member),
            )
            for member in cohort
            if member.name in replies
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
            reported = group(reply.tensors, DIAGNOSTICS)
            self.progress.diagnostics.append({key: float(t) for key, t in reported.items()})
        return accepted

    def _iterations(self, member: Member) -> int:
        """Return the iteration limit of equilibrium solves on a client's device; 1 without equilibrium layers."""
        own = max((layer.limit for _, layer in layers(self.task.module)), default=1)
        return min(own, self.budgets.get(member.name, own))

    def _last_upload(self, member: Member) -> State:
        """Return a client's last upload as the server has it; empty where the algorithm does not use last uploads."""
        if self.pipeline.last is None:
            return State()
        kept = self.store.get(member.index)
        return State({name.removeprefix(SENT): t for name, t in kept.items() if name.startswith(SENT)})

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
        line |= self.count_solves(round, *self.task.judge_reported(progress.solves))
        line |= diagnostic_figures(progress.diagnostics)
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

    def _take_scores(self, replies: dict[str, Reply], round: int, last: bool = False) -> None:
        """Take the scores of the models of a round; 0 if none were asked for. Only the last ones have forecasts."""
        for name, reply in replies.items():
            if not round or reply.answer.evaluated != round:
                continue
            try:
                unseen = self.roster.members[name].unseen
                scores, confusion = group(reply.tensors, "scores"), group(reply.tensors, "confusion")
                success = group(reply.tensors, SUCCESS_COUNTS)
                forecasts = group(reply.tensors, FORECASTS)
                if forecasts and not last:
                    raise RejectedMessage("scores", "errors of forecasts were sent before training was over")
                self.scores.add(name, scores, confusion, reply.answer.adapted, unseen, success, forecasts)
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
