"""Accounting of client-level differential privacy with Gaussian noise: epsilon from noise, and noise from epsilon.

Two federations are neighbours if they differ in all data of one client. The noise multiplier `z` is the standard
deviation of the noise divided by the sensitivity, the largest difference that one client can make: 2 C for a message
clipped to norm C.
"""

from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Any

from equipoise.errors import EquipoiseError


def accountant() -> Any:
    """Return the package that accounts; raise an error that names the extra if it is not installed."""
    try:
        import dp_accounting
    except ImportError:
        raise EquipoiseError(
            "the section [privacy] needs the package dp-accounting; install it with pip install 'equipoise[privacy]'"
        ) from None
    return dp_accounting


_LEAST_NOISE = 1e-4  # with less noise than this, epsilon would be in the millions


@dataclass(frozen=True)
class ReleaseCount:
    """The number of releases in a run that depend on one client."""

    rounds: int
    "number of rounds that the client takes part in; all rounds of the run if cohorts are secret"
    exchanges: int = 1
    "number of messages in a round"
    clients: int = 1
    "number of clients that cohorts are drawn from, if cohorts are secret"
    cohort: int = 1
    "number of clients drawn in a round, if cohorts are secret"

    @property
    def sampled(self) -> bool:
        """Tell whether the secret sampling of clients adds to privacy."""
        return self.cohort < self.clients

    def epsilon(self, z: float, delta: float) -> float:
        """Return the epsilon of all releases together, with noise multiplier z."""
        dp = accountant()
        if not self.rounds:
            return 0.0
        z = z / sqrt(self.exchanges)
        if z / sqrt(self.rounds) < _LEAST_NOISE:
            return inf
        # n releases with noise z reveal as much as one with z / sqrt(n).
        alone = float(dp.get_epsilon_gaussian(z / sqrt(self.rounds), delta))
        if not self.sampled:
            return alone
        return min(alone, float(self._renyi().compose(self._event(z), self.rounds).get_epsilon(delta)))

    def noise(self, epsilon: float, delta: float) -> float:
        """Return the smallest noise multiplier z for which all releases together have this epsilon."""
        dp = accountant()
        found = float(dp.get_sigma_gaussian(epsilon, delta)) * sqrt(self.rounds)
        # With sampling, epsilon is bounded from above, loosely if the cohort is large: then sampling saves no noise.
        if self.sampled and self._sampling_saves_noise(found, epsilon, delta):
            event = lambda z: dp.SelfComposedDpEvent(self._event(z), self.rounds)  # noqa: E731
            bracket = dp.ExplicitBracketInterval(min(0.1, found / 2), found)
            found = float(dp.calibrate_dp_mechanism(self._renyi, event, epsilon, delta, bracket))
        return found * sqrt(self.exchanges)

    def _sampling_saves_noise(self, z: float, epsilon: float, delta: float) -> bool:
        """Tell whether less noise than z is enough, because cohorts are sampled."""
        return float(self._renyi().compose(self._event(z), self.rounds).get_epsilon(delta)) < epsilon

    def _renyi(self) -> Any:
        dp = accountant()
        return dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)

    def _event(self, z: float) -> Any:
        dp = accountant()
        return dp.SampledWithoutReplacementDpEvent(self.clients, self.cohort, dp.GaussianDpEvent(z))


def classical_epsilon(z: float, delta: float) -> float | None:
    """Return the epsilon of one release by the textbook's bound (Dwork and Roth, 2014, Th. A.1).

    The bound is not tight, and holds only below 1; None where it does not hold.
    """
    epsilon = sqrt(2 * log(1.25 / delta)) / z if z else inf
    return epsilon if epsilon < 1 else None


def classical_noise(epsilon: float, delta: float) -> float:
    """Return the noise multiplier of one release by the same bound."""
    return sqrt(2 * log(1.25 / delta)) / epsilon
