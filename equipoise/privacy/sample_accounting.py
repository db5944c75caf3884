"""Accounting of sample-level differential privacy: what one sample can change of a client's training with noise.

Two federations are neighbours if one sample of one client contributes in one of them and contributes nothing (a
gradient of zero) in the other; how many samples a client has is public. Gradients of single samples are clipped to norm
C, so the sensitivity of their sum is C, and noise of standard deviation sigma has the noise multiplier z = sigma / C.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, sqrt
from typing import NamedTuple

from equipoise.privacy.accounting import ReleaseCount, accountant

_INTERVAL = 4e-3  # of privacy losses, where there is little noise
_FINEST_INTERVAL = 2e-5
_TOLERANCE = 1e-3  # of z, relative


class NoisedStep(NamedTuple):
    """A step of training: noise on the sum of the clipped gradients of a batch."""

    rate: float
    "probability with which a sample is in the batch; 1 if that is no secret"
    gradients: int = 1
    "number of gradients of the same batch, each with its own noise"


@dataclass(frozen=True)
class SampleReleases:
    """The noised steps in which one sample of a client can take part."""

    steps: Mapping[NoisedStep, int] = field(default_factory=dict)
    "number of steps of each kind"

    def __add__(self, other: "SampleReleases") -> "SampleReleases":
        return SampleReleases(Counter(self.steps) + Counter(other.steps))

    def times(self, count: int) -> "SampleReleases":
        """Return these steps, taken so many times."""
        return SampleReleases({step: count * number for step, number in self.steps.items() if count})

    @property
    def gaussians(self) -> int:
        """Return the number of gradients with noise, if all of them had the sample."""
        return sum(step.gradients * number for step, number in self.steps.items())

    def epsilon(self, z: float, delta: float) -> float:
        """Return the epsilon of all steps together, with noise multiplier z.

        Steps whose batches are no secret are composed exactly. Of those with Poisson sampling, privacy loss
        distributions give an upper bound (Koskela et al., 2020; Doroshenko et al., 2022).
        """
        return _epsilon(tuple(sorted(self.steps.items())), z, delta)

    def noise(self, epsilon: float, delta: float) -> float:
        """Return the noise multiplier for which all steps together have at most this epsilon."""
        return _noise(tuple(sorted(self.steps.items())), epsilon, delta)


Steps = tuple[tuple[NoisedStep, int], ...]


@lru_cache(maxsize=4096)
def _epsilon(steps: Steps, z: float, delta: float) -> float:
    plain = sum(step.gradients * number for step, number in steps if step.rate >= 1)
    sampled = [(step, number) for step, number in steps if step.rate < 1]
    if not plain and not sampled:
        return 0.0
    # Without sampling nothing is lost that exact composition does not count, so the smaller bound holds.
    alone = ReleaseCount(sum(step.gradients * number for step, number in steps)).epsilon(z, delta)
    if not sampled or alone == inf:
        return alone
    dp = accountant()
    interval = max(_INTERVAL / max(1.0, z) ** 1.5, _FINEST_INTERVAL)  # much noise makes losses small
    found = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, interval)
    if plain:
        found.compose(dp.GaussianDpEvent(z / sqrt(plain)))
    for step, number in sampled:
        # All gradients of one batch have the sample or none has it: they are one Gaussian mechanism, sampled once.
        event = dp.PoissonSampledDpEvent(step.rate, dp.GaussianDpEvent(z / sqrt(step.gradients)))
        found.compose(event, number)
    return min(alone, float(found.get_epsilon(delta)))


@lru_cache(maxsize=4096)
def _noise(steps: Steps, epsilon: float, delta: float) -> float:
    count = sum(step.gradients * number for step, number in steps)
    if not count:
        return 0.0
    high = ReleaseCount(count).noise(epsilon, delta)
    if all(step.rate >= 1 for step, _ in steps):
        return high
    low = high
    while low > 1e-3 and _epsilon(steps, low, delta) <= epsilon:
        high, low = low, low / 2
    while high > low * (1 + _TOLERANCE):
        middle = sqrt(low * high)
        low, high = (low, middle) if _epsilon(steps, middle, delta) <= epsilon else (middle, high)
    return high
