"""Waiting for the answers of an exchange: until all are there or the time is over; what comes late is told apart."""

import time
from collections.abc import Callable, Iterable

from equipoise.flower.door import Door
from equipoise.flower.post import Answered, Asked, Post

_LATE = 3  # exchanges for which an answer that comes late is still looked for, so that it is counted


class Exchange:
    def __init__(self, number: int, post: Post, door: Door, tell: Callable[[str, str], None]):
        self.number, self.post, self.door, self._tell = number, post, door, tell
        self.answers: dict[str, Answered] = {}
        "by the client's name, the first of each"

    def look(self) -> None:
        """Take in whatever has come: answers of this exchange, late ones, and newcomers."""
        for answered in self.post.answers():
            name, answer = answered.asked.name, answered.answer
            if answered.asked.order.hello:
                self.door.enrol(answered)
            elif answer.exchange != self.number:
                self.post.refuse("late", name, f"an answer to round {answer.exchange}, which is closed")
            elif name in self.answers:
                self.post.refuse("duplicate", name, f"a second answer to round {self.number}")
            elif answer.status != "done":
                self.post.refuse(answer.status, name, f"round {self.number}: it could not do it; its own log says why")
            else:
                self.answers[name] = answered

    def wait(self, names: Iterable[str], seconds: float, greet: Callable[[], None]) -> dict[str, Answered]:
        """The answers of these clients that came in time."""
        until = time.monotonic() + seconds
        names = set(names)
        self.post.forget(self.number - _LATE)
        while not names <= self.answers.keys() and time.monotonic() < until:
            self.look()
            if not any(map(self._current, self.post.waiting.values())):
                break  # whoever has not answered by now was refused
            greet()
            self.post.pause()
        silent = {asked.name for asked in self.post.waiting.values() if self._current(asked)}
        for name in sorted((names - self.answers.keys()) & silent):
            self._tell("no answer", f"round {self.number}: no answer from {name} in {seconds:g} seconds")
        return self.answers

    def _current(self, asked: Asked) -> bool:
        return not asked.order.hello and asked.order.exchange == self.number
