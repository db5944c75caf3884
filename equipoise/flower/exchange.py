"""Waiting for the answers of an exchange: until all are there or the time is over; what comes late is told apart."""

import time
from collections.abc import Callable, Iterable

from equipoise.flower.enrolment import Enrolment
from equipoise.flower.transport import PendingOrder, Reply, Transport

_LATE = 3  # exchanges for which an answer that comes late is still looked for, so that it is counted


class Exchange:
    def __init__(
        self, number: int, round: int, transport: Transport, enrolment: Enrolment, report: Callable[[str, str], None]
    ):
        self.number, self.round, self.transport, self.enrolment, self._report = (
            number,
            round,
            transport,
            enrolment,
            report,
        )
        self.replies: dict[str, Reply] = {}
        "by the client's name, the first of each"

    def look(self) -> None:
        """Take in whatever has come: answers of this exchange, late ones, and newcomers."""
        for reply in self.transport.replies():
            name, answer = reply.order_sent.name, reply.answer
            if reply.order_sent.order.hello:
                self.enrolment.enrol(reply)
            elif answer.number != self.number:
                late = reply.order_sent.order.exchange
                self.transport.refuse("late", name, f"an answer of round {late} that is waited for no longer")
            elif name in self.replies:
                self.transport.refuse("duplicate", name, f"a second answer to round {self.round}")
            elif answer.status != "done":
                self.transport.refuse(
                    answer.status, name, f"round {self.round}: it could not do it; its own log says why"
                )
            else:
                self.replies[name] = reply

    def wait(self, names: Iterable[str], seconds: float, greet: Callable[[], None]) -> None:
        """Take in the answers of these clients that come in time."""
        until = time.monotonic() + seconds
        names = set(names)
        self.transport.forget(self.round - _LATE)
        while not names <= self.replies.keys() and time.monotonic() < until:
            self.look()
            if not any(map(self._current, self.transport.waiting.values())):
                break  # whoever has not reply by now was refused
            greet()
            self.transport.pause()
        for name in sorted(self.silent):
            self._report("no answer", f"round {self.round}: no answer from {name} in {seconds:g} seconds")

    @property
    def silent(self) -> set[str]:
        """Who was asked and has said nothing yet."""
        return {asked.name for asked in self.transport.waiting.values() if self._current(asked)}

    def _current(self, asked: PendingOrder) -> bool:
        return not asked.order.hello and asked.order.number == self.number
