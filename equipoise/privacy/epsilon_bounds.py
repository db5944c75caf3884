"""Empirical lower bounds of epsilon: what the error rates of an attack say about any guarantee.

Nothing here uses the accountant, so that its errors are found as well.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.privacy.membership import MembershipScores


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound of epsilon, and the attack that gives it."""

    epsilon: float
    "no mechanism with a smaller epsilon has an attack as good as this one, at the stated confidence"
    gaussian_epsilon: float
    "the same if the mechanism is known to be the Gaussian one: much larger"
    confidence: float
    delta: float
    false_positives: int
    "others that the attack took for members, at its threshold"
    false_negatives: int
    "members that it missed"
    others: int
    "number of others on which the threshold was judged"
    members: int
    "number of members on which it was judged"


def upper_limits(hits: np.ndarray, trials: int, alpha: float) -> np.ndarray:
    """Return the upper limits of Clopper and Pearson (1934) of probabilities, which fail with probability alpha.

    Args:
        hits: numbers of successes.
        trials: number of trials.
        alpha: probability that a limit is too small.
    """
    from scipy.stats import beta

    hits = np.asarray(hits)
    found = beta.ppf(1 - alpha, np.minimum(hits, trials - 1) + 1, np.maximum(trials - hits, 1))
    return np.asarray(np.where(hits >= trials, 1.0, found))


def least_epsilons(false_positive: np.ndarray, false_negative: np.ndarray, delta: float) -> np.ndarray:
    """Return the smallest epsilon with which attacks may have these error rates at delta (Kairouz et al., 2015).

    A test of two neighbours satisfies TPR <= e^epsilon FPR + delta, and the same with errors exchanged.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        one = np.log(np.maximum(1 - delta - false_negative, 0)) - np.log(false_positive)
        other = np.log(np.maximum(1 - delta - false_positive, 0)) - np.log(false_negative)
    return np.asarray(np.maximum(np.fmax(one, other), 0))


def least_distances(false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
    """Return the smallest mu of Gaussian differential privacy with which attacks may have these error rates.

    A test of N(0, 1) against N(mu, 1) has at least these errors (Dong et al., 2022, Eq. 6).
    """
    from scipy.stats import norm

    return np.asarray(np.maximum(norm.isf(false_positive) - norm.ppf(false_negative), 0))


def epsilon_of_distance(mu: float, delta: float) -> float:
    """Return the epsilon at delta of the test of N(0, 1) against N(mu, 1) (Balle and Wang, 2018, Th. 8).

    Args:
        mu: the distance, in standard deviations of the noise.
        delta: the delta that belongs to epsilon.
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr, ndtr

    def excess(epsilon: float) -> float:
        one, other = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        return float(ndtr(one) - np.exp(epsilon + log_ndtr(other))) - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, mu**2 / 2 + mu * 40))


def epsilon_bound(
    scores: MembershipScores,
    delta: float,
    confidence: float,
    rng: np.random.Generator,
    threshold: float | None = None,
) -> EpsilonBound:
    """Bound epsilon from below by an attack.

    A threshold that is not known beforehand is chosen on one half of the scores and judged on the other, because the
    best of many is too good by chance.

    Args:
        scores: the scores of members and of others.
        delta: the delta that belongs to epsilon.
        confidence: probability with which a bound holds, if trials are independent.
        rng: divides the scores.
        threshold: the threshold that is best against normal noise, if it is known beforehand.
    """
    alpha = (1 - confidence) / 2  # one half for each kind of error
    tried, judged = scores.halves(rng)
    false, missed = _limits(tried, tried.thresholds, alpha)
    best = tried.thresholds[np.argmax(least_epsilons(false, missed, delta))]
    normal = judged if threshold is None else scores
    if threshold is None:
        threshold = float(tried.thresholds[np.argmax(least_distances(false, missed))])
    found = least_epsilons(*_limits(judged, np.array([best]), alpha), delta)
    distance = float(least_distances(*_limits(normal, np.array([threshold]), alpha))[0])
    positives, hits = judged.counts(np.array([best]))
    return EpsilonBound(
        epsilon=float(found[0]),
        gaussian_epsilon=epsilon_of_distance(distance, delta),
        confidence=confidence,
        delta=delta,
        false_positives=int(positives[0]),
        false_negatives=len(judged.members) - int(hits[0]),
        others=len(judged.others),
        members=len(judged.members),
    )


def _limits(scores: MembershipScores, thresholds: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the upper limits of false positive and false negative rates at each threshold."""
    positives, found = scores.counts(thresholds)
    missed = len(scores.members) - found
    return upper_limits(positives, len(scores.others), alpha), upper_limits(missed, len(scores.members), alpha)
