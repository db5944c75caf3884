"""How much Gaussian noise says about one client: epsilon from noise, and noise from epsilon.

Two federations are neighbours if they differ in all that one client has. `z` is the standard deviation of the noise,
over the most by which the two then differ: for a message cut down to the norm C, 2 C.
"""

from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Any

from equipoise.errors import EquipoiseError


def _accountant() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise EquipoiseError(
            "the section [privacy] needs the package dp-accounting; install it with pip install 'equipoise[privacy]'"
        ) from None
    return dp_accounting


_NOTHING = 1e-4  # less noise than this hides nothing: epsilon would be in the millions


@dataclass(frozen=True)
class ReleaseCount:
    """What is released in a run, as far as one client can be in it."""

    rounds: int
    "in which it takes part; where cohorts are drawn in secret, those of the run"
    exchanges: int = 1
    "messages in a round"
    clients: int = 1
    cohort: int = 1
    "of that many clients are drawn in a round, if it is nobody's to see which"

    @property
    def sampled(self) -> bool:
        return self.cohort < self.clients

    def epsilon(self, z: float, delta: float) -> float:
        """Of all releases together."""
        dp = _accountant()
        if not self.rounds:
            return 0.0
        z = z / sqrt(self.exchanges)
        if z / sqrt(self.rounds) < _NOTHING:
            return inf
        # n releases with noise z tell as much as one with z / sqrt(n).
        alone = float(dp.get_epsilon_gaussian(z / sqrt(self.rounds), delta))
        if not self.sampled:
            return alone
        return min(alone, float(self._renyi().compose(self._event(z), self.rounds).get_epsilon(delta)))

    def noise(self, epsilon: float, delta: float) -> float:
        """The smallest z with which all releases together have this epsilon."""
        dp = _accountant()
        found = float(dp.get_sigma_gaussian(epsilon, delta)) * sqrt(self.rounds)
        # What sampling saves is bounded from above, loosely where much is sampled; it may save nothing.
        if self.sampled and self._saves(found, epsilon, delta):
            event = lambda z: dp.SelfComposedDpEvent(self._event(z), self.rounds)  # noqa: E731
            bracket = dp.ExplicitBracketInterval(min(0.1, found / 2), found)
            found = float(dp.calibrate_dp_mechanism(self._renyi, event, epsilon, delta, bracket))
        return found * sqrt(self.exchanges)

    def _saves(self, z: float, epsilon: float, delta: float) -> bool:
        """Is less noise than z enough, as cohorts are drawn?"""
        return float(self._renyi().compose(self._event(z), self.rounds).get_epsilon(delta)) < epsilon

    def _renyi(self) -> Any:
        dp = _accountant()
        return dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)

    def _event(self, z: float) -> Any:
        dp = _accountant()
        return dp.SampledWithoutReplacementDpEvent(self.clients, self.cohort, dp.GaussianDpEvent(z))


def classical_epsilon(z: float, delta: float) -> float | None:
    """Of one release, by the textbook's bound (Dwork and Roth, 2014, Th. A.1); it holds below 1, and is not tight."""
    epsilon = sqrt(2 * log(1.25 / delta)) / z if z else inf
    return epsilon if epsilon < 1 else None


def classical_noise(epsilon: float, delta: float) -> float:
    return sqrt(2 * log(1.25 / delta)) / epsilon
