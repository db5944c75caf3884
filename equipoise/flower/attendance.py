"""Attendance: greet nodes, wait for clients, and draw the cohort of a round."""

import time
from collections.abc import Callable, Collection

import numpy as np

from equipoise import randomness
from equipoise.config.deployment import Deploy
from equipoise.config.engine import Schedule
from equipoise.flower.enrolment import Enrolment
from equipoise.flower.exchange import Exchange
from equipoise.flower.roster import Member
from equipoise.flower.transport import Transport


class TooFewClients(Exception):
    """Fewer clients came in time than a round needs."""


class Attendance:
    """Finds clients, and waits for them."""

    def __init__(
        self,
        transport: Transport,
        enrolment: Enrolment,
        settings: Deploy,
        schedule: Schedule,
        report: Callable[[str, str], None],
    ):
        self.transport, self.enrolment, self.settings = transport, enrolment, settings
        self.schedule, self.report = schedule, report
        self.run = ""
        "identity of the run, which greetings contain"

    @property
    def lifetime(self) -> float:
        """Return the seconds for which Flower keeps an order, so that late replies are seen and clocks may differ."""
        return 2 * self.settings.deadline + 600

    def greet(self) -> None:
        """Ask new nodes who they are."""
        self.enrolment.greet(self.run, self.settings.deadline, self.lifetime)

    def gather(self, round: int, wanted: int, seconds: float) -> None:
        """Wait until as many clients are here as wanted; continue with fewer if they are enough for a round.

        Args:
            round: the round that waits.
            wanted: number of clients.
            seconds: the longest time to wait.
        """
        until = time.monotonic() + seconds
        while len(self.enrolment.present()) < wanted and time.monotonic() < until:
            self._poll(round)
        here, needed = len(self.enrolment.present()), self.settings.minimum
        if here < needed:
            raise TooFewClients(f"{here} clients came within {seconds:g} seconds, and a round needs {needed}")
        if here < wanted:
            self.report("waiting", f"only {here} of {wanted} clients came; continuing with them")

    def refresh(self, round: int) -> None:
        """Find out who is here now, and wait if they are fewer than a round needs."""
        self.transport.online(now=True)
        self.gather(round, self.settings.minimum, self.settings.deadline)
        self.greet()

    def sample(self, round: int) -> list[Member]:
        """Draw the cohort of a round from the clients that are here, in the order of their names."""
        present = self.enrolment.present()
        if not present:
            return []
        wanted = self.schedule.participation
        cohort = min(wanted, len(present)) if isinstance(wanted, int) else self.schedule.cohort(len(present))
        rng = randomness.generator(self.schedule.seed, "participation", round)
        return [present[rank] for rank in np.sort(rng.choice(len(present), cohort, replace=False))]

    def remaining(self, round: int, participants: Collection[str]) -> list[Member]:
        """Return those participants of a round that are still here, waiting for as many as a round needs."""
        until = time.monotonic() + self.settings.deadline
        while True:
            here = [member for member in self.enrolment.present() if member.name in participants]
            if len(here) >= self.settings.minimum or time.monotonic() > until:
                return here
            self._poll(round)

    def _poll(self, round: int) -> None:
        """Greet new nodes and take in their replies."""
        self.greet()
        Exchange(0, round, self.transport, self.enrolment, self.report).look()
        self.transport.pause()
