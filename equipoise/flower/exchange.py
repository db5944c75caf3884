"""An exchange of a round: the wait for the answers to its orders, until all are there or time is up."""

import time
from collections.abc import Callable, Iterable

from equipoise.flower.enrolment import Enrolment
from equipoise.flower.transport import PendingOrder, Reply, Transport

_LATE = 3  # rounds for which late answers are still collected, so that they are counted


class Exchange:
    """One order to each of some clients, and their answers."""

    def __init__(
        self, number: int, round: int, transport: Transport, enrolment: Enrolment, report: Callable[[str, str], None]
    ):
        """Create an exchange.

        Args:
            number: the number of its orders.
            round: the round that it belongs to.
            transport: sends orders and collects answers.
            enrolment: takes the answers of new nodes.
            report: gets the name of an event and its text.
        """
        self.number, self.round = number, round
        self.transport, self.enrolment, self._report = transport, enrolment, report
        self.replies: dict[str, Reply] = {}
        "first valid reply of each client, by name"

    def look(self) -> None:
        """Process what has arrived: answers of this exchange, late answers, and greetings."""
        for reply in self.transport.replies():
            name, answer = reply.order_sent.name, reply.answer
            if reply.order_sent.order.hello:
                self.enrolment.enrol(reply)
            elif answer.number != self.number:
                late = reply.order_sent.order.exchange
                self.transport.refuse("late", name, f"its answer for round {late} is too late")
            elif name in self.replies:
                self.transport.refuse("duplicate", name, f"a second answer for round {self.round}")
            elif answer.status != "done":
                self.transport.refuse(
                    answer.status, name, f"round {self.round}: the order failed; see the client's log"
                )
            else:
                self.replies[name] = reply

    def wait(self, names: Iterable[str], seconds: float, greet: Callable[[], None]) -> None:
        """Collect the answers of these clients until all are there or time is up.

        Args:
            names: the clients that were asked.
            seconds: the longest time to wait.
            greet: greets new nodes; called while waiting.
        """
        until = time.monotonic() + seconds
        names = set(names)
        self.transport.forget(self.round - _LATE)
        while not names <= self.replies.keys() and time.monotonic() < until:
            self.look()
            if not any(map(self._current, self.transport.waiting.values())):
                break  # the replies that are missing were refused
            greet()
            self.transport.pause()
        for name in sorted(self.silent):
            self._report("no answer", f"round {self.round}: no answer from {name} in {seconds:g} seconds")

    @property
    def silent(self) -> set[str]:
        """Return the names of the clients that were asked and have not replied yet."""
        return {pending.name for pending in self.transport.waiting.values() if self._current(pending)}

    def _current(self, pending: PendingOrder) -> bool:
        return not pending.order.hello and pending.order.number == self.number
