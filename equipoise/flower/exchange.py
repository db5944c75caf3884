"""Waiting for the answers of an exchange: until all are there or the time is over; what comes late is told apart."""

import time
from collections.abc import Callable, Iterable

from equipoise.flower.enrolment import Enrolment
from equipoise.flower.transport import PendingOrder, Reply, Transport

_LATE = 3  # exchanges for which an answer that comes late is still looked for, so that it is counted


class Exchange:
    def __init__(self, number: int, round: int, post: Transport, door: Enrolment, tell: Callable[[str, str], None]):
        self.number, self.round, self.post, self.door, self._tell = number, round, post, door, tell
        self.answers: dict[str, Reply] = {}
        "by the client's name, the first of each"

    def look(self) -> None:
        """Take in whatever has come: answers of this exchange, late ones, and newcomers."""
        for answered in self.post.answers():
            name, answer = answered.asked.name, answered.answer
            if answered.asked.order.hello:
                self.door.enrol(answered)
            elif answer.number != self.number:
                late = answered.asked.order.exchange
                self.post.refuse("late", name, f"an answer of round {late} that is waited for no longer")
            elif name in self.answers:
                self.post.refuse("duplicate", name, f"a second answer to round {self.round}")
            elif answer.status != "done":
                self.post.refuse(answer.status, name, f"round {self.round}: it could not do it; its own log says why")
            else:
                self.answers[name] = answered

    def wait(self, names: Iterable[str], seconds: float, greet: Callable[[], None]) -> None:
        """Take in the answers of these clients that come in time."""
        until = time.monotonic() + seconds
        names = set(names)
        self.post.forget(self.round - _LATE)
        while not names <= self.answers.keys() and time.monotonic() < until:
            self.look()
            if not any(map(self._current, self.post.waiting.values())):
                break  # whoever has not answered by now was refused
            greet()
            self.post.pause()
        for name in sorted(self.silent):
            self._tell("no answer", f"round {self.round}: no answer from {name} in {seconds:g} seconds")

    @property
    def silent(self) -> set[str]:
        """Who was asked and has said nothing yet."""
        return {asked.name for asked in self.post.waiting.values() if self._current(asked)}

    def _current(self, asked: PendingOrder) -> bool:
        return not asked.order.hello and asked.order.number == self.number
