"""Enrolment: new nodes are asked who they are, and become clients of this run or are turned away."""

import math
import time
from collections.abc import Callable

from equipoise.flower.codec import RejectedMessage
from equipoise.flower.protocol import Answer, Order
from equipoise.flower.roster import Member, Roster
from equipoise.flower.transport import Reply, Transport

_RETRY = 60.0  # seconds until a node that could not take part is asked again


class Enrolment:
    """Asks new nodes who they are, and adds them to the roster."""

    def __init__(
        self,
        transport: Transport,
        roster: Roster,
        layout: str,
        report: Callable[[str, str], None],
        largest_size: float,
        needs_size: bool,
        expected: int,
    ):
        """Prepare the enrolment of a run.

        Args:
            transport: sends greetings.
            roster: gets the clients.
            layout: fingerprint of the layout of the model's parameters.
            report: gets the name of an event and its text.
            largest_size: the largest number of samples that a client may announce.
            needs_size: whether clients that train must announce their number of samples.
            expected: number of clients that the first round waits for.
        """
        self.transport, self.roster, self.layout, self._report = transport, roster, layout, report
        self.largest_size, self.needs_size, self.expected = largest_size, needs_size, expected
        self.heavy: set[str] = set()
        "clients that were reported because they outweigh all others"

    def present(self, unseen: bool = False) -> list[Member]:
        """Return the clients that are here, in the order of their names: those that train, or the `unseen` ones."""
        return self.roster.present(self.transport.online(), unseen)

    def greet(self, run: str, patience: float, lifetime: float) -> None:
        """Ask new nodes who they are, and after a while also those that were turned away, as the cause may be fixed.

        Args:
            run: identity of the run.
            patience: seconds to wait for an answer before a node is asked again.
            lifetime: seconds for which Flower keeps the message.
        """
        now = time.monotonic()
        greeted = {pending.node: pending.sent for pending in self.transport.waiting.values() if pending.order.hello}
        for node in self.transport.online():
            waiting = now - greeted.get(node, -math.inf) < patience
            turned_away = now - self.transport.turned_away.get(node, -math.inf) < _RETRY
            if self.roster.of(node) is None and not waiting and not turned_away:
                self.transport.send(node, f"node {node}", Order(run=run, hello=True), {}, lifetime)

    def enrol(self, reply: Reply) -> None:
        """Add a greeted node to the roster by its reply, or turn it away."""
        answer, node = reply.answer, reply.order_sent.node
        try:
            if answer.status != "hello":
                raise RejectedMessage(answer.status, f"{answer.client!r} cannot take part; see the client's log")
            if answer.layout != self.layout:
                raise RejectedMessage("unknown", f"{answer.client!r} has a different model from the server")
            self._check_size(answer)
            online = self.transport.online()
            known = answer.client in self.roster.members
            registered = {identity: info.name for identity, info in online.items()}
            member = self.roster.enrol(answer.client, node, answer.unseen, registered)
            # A client that comes back with more samples weighs as much as before: nobody has seen the new ones.
            member.samples = min(answer.size, member.samples) if known and member.samples else answer.size
            self._report("back" if known else "joined", f"{member.name} {'is back' if known else 'joined'}")
            self._report_heavy(member, answer.size)
        except RejectedMessage as error:
            self.transport.turned_away[node] = time.monotonic()
            self.transport.refuse(error.reason, f"node {node}", str(error))

    def _report_heavy(self, member: Member, announced: int) -> None:
        """Report a client that outweighs all others together, and one that announces more than it did before."""
        if announced > member.samples:
            self._report("weight", f"{member.name} now announces {announced} samples; {member.samples} still count")
        training = [each for each in self.roster.members.values() if not each.unseen]
        total = sum(each.samples for each in training)
        for each in training if self.needs_size and len(training) >= max(3, self.expected) else []:
            if each.samples > total / 2 and each.name not in self.heavy:
                self.heavy.add(each.name)
                share = f"{each.samples} of all {total} samples"
                self._report("weight", f"{each.name} announces {share}, more than all others together")

    def _check_size(self, answer: Answer) -> None:
        """Raise RejectedMessage if a client announces no samples where it must, or more than it may."""
        if answer.size > self.largest_size:
            raise RejectedMessage(
                "size",
                f"{answer.client!r} announces {answer.size} samples, more than deploy.largest_weight = "
                f"{self.largest_size:g}; set that higher if it is true",
            )
        if self.needs_size and not answer.size and not answer.unseen:
            raise RejectedMessage("size", f"{answer.client!r} does not announce its number of samples")
