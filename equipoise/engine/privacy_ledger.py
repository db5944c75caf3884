"""The ledger of a run's privacy: how much noise it adds, and what clients have released so far."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import Privacy


class PrivacyLedger:
    """The noise of a run, and the messages that it has covered."""

    def __init__(self, privacy: Privacy | None):
        self.privacy = privacy
        self.sigma = 0.0
        "standard deviation of the noise"
        self.released: Counter[str] = Counter()
        "number of messages that each client has sent, by name, where privacy depends on it"
        self.sums = 0
        "number of noised sums that were released, with central noise"
        self.not_covered: Sequence[str] = ()
        "what leaves clients without being covered by privacy"

    def plan(self, planned: ReleaseCount, not_covered: Sequence[str]) -> str | None:
        """Find the noise for what is planned, before the first round.

        Args:
            planned: what one client can release in the whole run.
            not_covered: what leaves clients without noise.

        Returns:
            What the user must know about it, or None without privacy.
        """
        if self.privacy is None:
            return None
        self.sigma = self.privacy.noise(planned)
        self.privacy.guarantee(self.sigma, planned)  # raises now if it cannot be accounted for
        self.not_covered = not_covered
        what = " and ".join(not_covered)
        return f"privacy covers the messages that models are trained with; clients' {what} are not covered by it"

    def guarantee(self, releases: ReleaseCount) -> dict[str, Any]:
        """Return the guarantee for summary.json, given what was released."""
        assert self.privacy is not None
        return {**self.privacy.guarantee(self.sigma, releases), "not_covered": list(self.not_covered)}

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return {"sigma": self.sigma, "released": self.released, "sums": self.sums}

    def restore(self, facts: dict[str, Any], rounds: int) -> None:
        """Restore what `facts` returned; `rounds` is the number of rounds that the run has now."""
        if self.privacy is None:
            return
        if facts["sigma"] != self.sigma:
            raise EquipoiseError(
                f"the run began with sigma = {facts['sigma']:g}, found for its number of rounds; with {rounds} of them "
                f"privacy.target_epsilon = {self.privacy.target_epsilon} needs {self.sigma:g}"
            )
        self.released, self.sums = Counter(facts["released"]), facts["sums"]

    def keep_releases(self, facts: dict[str, Any]) -> None:
        """Count at least what these facts counted: a run that goes back does not take back what clients released."""
        if self.privacy is not None:
            self.released |= Counter(facts.get("released", {}))
            self.sums = max(self.sums, facts.get("sums", 0))
