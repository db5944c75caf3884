"""Conformal intervals: margins around forecasts that a client's validation samples ask for.

If validation and test samples are exchangeable, an interval of level 1 - a holds at least that share of the targets,
whatever the model is (Vovk et al., 2005; for quantiles Romano, Patterson and Candès, 2019).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np

from equipoise.errors import EquipoiseError

LEVEL = 0.9
"""The level of intervals where none is named."""


def check_level(level: float) -> None:
    """Raise an error unless this is the level of an interval."""
    if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 < level < 1:
        raise EquipoiseError(f"level = {level!r} is not allowed; it is a probability between 0 and 1, such as {LEVEL}")


def rank(samples: int, level: float) -> int:
    """Return which of the sorted residuals is the margin, ceil((n + 1)(1 - a)), counted from 1."""
    return ceil(Fraction(str(level)) * (samples + 1))  # as written: 0.9 as a binary fraction is a little more


def fewest_samples(level: float) -> int:
    """Return the least number of validation samples for which intervals are not infinite."""
    return next(n for n in range(1, ceil(2 / (1 - Fraction(str(level)))) + 1) if rank(n, level) <= n)


@dataclass(frozen=True)
class Forecasts:
    """A model's forecasts, scaled as its targets, one row per sample and one column per step of the horizon."""

    point: np.ndarray
    lower: np.ndarray
    "lower end of the interval; the lowest quantile as long as it is not conformal"
    upper: np.ndarray

    def widened(self, margin: np.ndarray) -> "Forecasts":
        """Return forecasts with these margins added to each step; intervals always contain the point forecast.

        Args:
            margin: one number per step; negative ones make intervals of quantiles narrower.
        """
        lower = np.minimum(self.lower - margin, self.point)
        return Forecasts(self.point, lower, np.maximum(self.upper + margin, self.point))


def conformal_margin(forecasts: Forecasts, targets: np.ndarray, level: float) -> np.ndarray:
    """Return the margin of each step at which intervals hold enough of the validation targets.

    Without quantiles, lower and upper end are both the point forecast, and the margin is a quantile of the absolute
    residuals. It is infinite where there are too few samples.

    Args:
        forecasts: forecasts of the validation samples.
        targets: what came of them, in rows as the forecasts.
        level: the probability that an interval is to have.
    """
    samples = len(targets)
    which = rank(samples, level)
    if which > samples:
        return np.full(forecasts.point.shape[1], np.inf)
    outside = np.maximum(forecasts.lower - targets, targets - forecasts.upper)
    return np.asarray(np.sort(outside, axis=0)[which - 1])
