"""The ledger of a run's privacy: how much noise it adds, and what clients have released so far."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from equipoise.errors import EquipoiseError
from equipoise.privacy.mechanisms import Noise, Privacy, Releases


class RunReleases(Protocol):
    """What clients release in a run, or have released in a part of it."""

    def sigma(self, privacy: Privacy) -> float:
        """Return the standard deviation of the noise that is needed for it."""
        ...

    def guarantee(self, privacy: Privacy, sigma: float) -> dict[str, Any]:
        """Return what it guarantees with this noise, for summary.json."""
        ...


class MessageReleases:
    """Releases of messages with noise, for the privacy of clients."""

    def __init__(self, releases: Releases):
        self.releases = releases

    def sigma(self, privacy: Privacy) -> float:
        """Return the standard deviation of the noise on messages, or on their sum."""
        return privacy.noise(self.releases)

    def guarantee(self, privacy: Privacy, sigma: float) -> dict[str, Any]:
        """Return what these messages guarantee with this noise, for summary.json."""
        return privacy.guarantee(sigma, self.releases)


class PrivacyLedger:
    """The noise of a run, and the messages that it has covered."""

    def __init__(self, privacy: Privacy | None):
        self.privacy = privacy
        self.sigma = 0.0
        "standard deviation of the noise; of sums with adaptive clipping, if the clip stays what it is at first"
        self.clip = 0.0 if privacy is None else privacy.clip
        "the clip of the next round"
        self.cohort = 1
        "number of clients in a round, with adaptive clipping"
        self.released: Counter[str] = Counter()
        "number of messages that each client has sent, by name, where privacy depends on it"
        self.sums = 0
        "number of noised sums that were released, with central noise"
        self.not_covered: Sequence[str] = ()
        "what leaves clients without being covered by privacy"

    def plan(self, planned: RunReleases, not_covered: Sequence[str]) -> str | None:
        """Find the noise for what is planned, before the first round.

        Args:
            planned: what one client can release in the whole run.
            not_covered: what leaves clients without noise.

        Returns:
            What the user must know about it, or None without privacy.
        """
        if self.privacy is None:
            return None
        self.sigma = planned.sigma(self.privacy)
        planned.guarantee(self.privacy, self.sigma)  # raises now if it cannot be accounted for
        if self.privacy.adaptive is not None:
            self.sigma_of_sum  # noqa: B018  raises now if the noise of the number is too little
        self.not_covered = not_covered
        what = " and ".join(not_covered)
        covers = "the messages that models are trained with"
        if self.privacy.of_samples:
            covers = "all that clients send and all models"
        return f"privacy covers {covers}; clients' {what} are not covered by it"

    @property
    def sigma_of_sum(self) -> float:
        """Return the standard deviation of the noise on the next sum of messages."""
        if self.privacy is None or self.privacy.adaptive is None:
            return self.sigma
        return 2 * self.clip * self.privacy.adaptive.noise_of_messages(self._multiplier, self.cohort)

    @property
    def _multiplier(self) -> float:
        """Return the noise multiplier of a round, sum and number of short messages together."""
        assert self.privacy is not None
        return self.sigma / (2 * self.privacy.clip)

    def adapt(self, short: int, noise: Noise) -> None:
        """Move an adaptive clip after a round.

        Args:
            short: the number of messages that were shorter than the clip.
            noise: source of the noise on this number.
        """
        if self.privacy is None or (adaptive := self.privacy.adaptive) is None:
            return
        spread = adaptive.noise_of_count(self._multiplier, self.cohort) if self.sigma else 0.0
        number = short + (spread * float(noise((1,))) if spread else 0.0)
        self.clip = adaptive.next(self.clip, number / self.cohort)

    def guarantee(self, releases: RunReleases) -> dict[str, Any]:
        """Return the guarantee for summary.json, given what was released."""
        assert self.privacy is not None
        adaptive: dict[str, Any] = {}
        if self.privacy.adaptive is not None:
            count = self.privacy.adaptive.noise_of_count(self._multiplier, self.cohort) if self.sigma else 0.0
            adaptive = {"clip_next": self.clip, "count_noise": count}
        found = releases.guarantee(self.privacy, self.sigma)
        return {**found, **adaptive, "not_covered": list(self.not_covered)}

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        facts = {"sigma": self.sigma, "released": self.released, "sums": self.sums}
        adapts = self.privacy is not None and self.privacy.adaptive is not None
        return {**facts, "clip": self.clip} if adapts else facts

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
        self.clip = facts.get("clip", self.clip)

    def keep_releases(self, facts: dict[str, Any]) -> None:
        """Count at least what these facts counted: a run that goes back does not take back what clients released."""
        if self.privacy is not None:
            self.released |= Counter(facts.get("released", {}))
            self.sums = max(self.sums, facts.get("sums", 0))
