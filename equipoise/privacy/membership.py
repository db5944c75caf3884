"""Membership inference: scores that tell members from others, and how well they do it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

_FEW = 64
"""Shadow runs below which spreads are those of all candidates together (Carlini et al., 2022, Sec. IV-C)."""
_LEAST_SPREAD = 1e-6


@dataclass(frozen=True, eq=False)
class MembershipScores:
    """The scores that an attack gives to members and to others; the higher, the likelier a member."""

    members: np.ndarray
    others: np.ndarray

    @cached_property
    def roc(self) -> tuple[np.ndarray, np.ndarray]:
        """Return false and true positive rates at every threshold, from (0, 0) to (1, 1)."""
        false, true = self.counts(self.thresholds)
        return np.append(0.0, false / len(self.others)), np.append(0.0, true / len(self.members))

    @property
    def thresholds(self) -> np.ndarray:
        """Return all thresholds that make a difference, the highest first; equal scores are one of them."""
        return np.unique(np.concatenate([self.members, self.others]))[::-1]

    def counts(self, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many others, and how many members, have at least each of these scores."""
        found = [len(s) - np.searchsorted(np.sort(s), thresholds, side="left") for s in (self.others, self.members)]
        return found[0], found[1]

    @property
    def auc(self) -> float:
        """Return the area under the ROC curve: the probability that a member has the higher score."""
        return float(np.trapezoid(self.roc[1], self.roc[0]))

    @property
    def advantage(self) -> float:
        """Return the largest difference between true and false positive rates (Yeom et al., 2018)."""
        return float((self.roc[1] - self.roc[0]).max())

    def true_positives_at(self, rate: float) -> float:
        """Return the largest true positive rate whose false positive rate is at most `rate`."""
        false, true = self.roc
        return float(true[false <= rate].max())

    def halves(self, rng: np.random.Generator) -> tuple["MembershipScores", "MembershipScores"]:
        """Divide members and others at random, to choose a threshold on one half and to judge it on the other."""
        parts = [np.array_split(rng.permutation(scores), 2) for scores in (self.members, self.others)]
        return MembershipScores(parts[0][0], parts[1][0]), MembershipScores(parts[0][1], parts[1][1])


def likelihood_ratios(observed: np.ndarray, shadows: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Return the logarithm of the likelihood ratio of each candidate (LiRA; Carlini et al., 2022, Alg. 1).

    Confidences of a candidate are taken to be normal, with one mean in shadow runs that have it and another in those
    that do not. With few shadow runs their spreads are those of all candidates together.

    Args:
        observed: confidence of each candidate under the attacked model.
        shadows: confidences under the models of shadow runs, one row per run.
        inside: which candidates each shadow run has trained on, in the same shape.
    """
    found = []
    for there in (inside, ~inside):
        values = np.where(there, shadows, np.nan)
        mean = np.nanmean(values, axis=0)
        apart = np.square(values - mean)
        if len(shadows) < _FEW:  # each mean takes one degree of freedom
            variance = np.nansum(apart) / max(there.sum() - there.any(axis=0).sum(), 1)
        else:
            variance = np.nansum(apart, axis=0) / np.maximum(there.sum(axis=0) - 1, 1)
        spread = np.sqrt(variance).clip(min=_LEAST_SPREAD)
        found.append(-np.square((observed - mean) / spread) / 2 - np.log(spread))
    return np.asarray(found[0] - found[1])


def each_against_others(confidences: np.ndarray, inside: np.ndarray) -> MembershipScores:
    """Attack each run with all others as its shadow runs, and return the scores of all of them together.

    Args:
        confidences: confidence of each candidate under each run's model, one row per run.
        inside: which candidates each run has trained on, in the same shape.
    """
    scores = np.empty_like(confidences)
    for run in range(len(confidences)):
        rest = np.arange(len(confidences)) != run
        scores[run] = likelihood_ratios(confidences[run], confidences[rest], inside[rest])
    return MembershipScores(scores[inside], scores[~inside])
