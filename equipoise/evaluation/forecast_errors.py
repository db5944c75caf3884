"""Errors of forecasts as sums, from which the figures of one client, and those pooled over clients, are made."""

from dataclasses import dataclass
from typing import Any

import numpy as np

FIGURES = ("mae", "rmse", "wape", "mase", "skill")
"""The figures of forecasts: mean absolute error; root of the mean squared error; sum of absolute errors by sum of
absolute values; mean absolute error by that of the one-step naive forecast in the training part; and
1 - MAE / MAE of the weekly naive forecast, on the values for which there is one."""


@dataclass(frozen=True)
class ForecastErrors:
    """Sums over the values that a model, or a naive forecast, has forecast."""

    values: np.ndarray
    "number of values that were forecast, for each step of the horizon"
    absolute: np.ndarray
    "sum of absolute errors, for each step"
    squared: float
    size: float
    "sum of the absolute values themselves"
    relative: float
    "sum of absolute errors, each by the mean absolute error of the naive forecast in the training part (MASE)"
    relative_values: int
    "number of values in it: those of series whose training part has such an error"
    compared: float
    "sum of absolute errors on the values for which there is a weekly naive forecast"
    naive: float
    "the same sum for that naive forecast"
    compared_values: int

    @staticmethod
    def of(forecast: np.ndarray, actual: np.ndarray, weekly: np.ndarray, naive_error: np.ndarray) -> "ForecastErrors":
        """Sum up the errors of forecasts, all in the data's own unit and with one row per sample.

        Args:
            forecast: the forecasts; NaN where there is none.
            actual: what came of them.
            weekly: the weekly naive forecasts; NaN where there is none.
            naive_error: of each sample's series, the mean absolute error that MASE divides by.
        """
        known = ~np.isnan(forecast)
        errors = np.where(known, np.abs(forecast - actual), 0.0)
        defined = known & (naive_error > 0)[:, None]  # a series that repeats itself exactly has no scale
        both = known & ~np.isnan(weekly)
        return ForecastErrors(
            known.sum(0),
            errors.sum(0),
            float((errors**2).sum()),
            float(np.abs(actual[known]).sum()),
            float((errors / np.where(naive_error > 0, naive_error, 1.0)[:, None])[defined].sum()),
            int(defined.sum()),
            float(errors[both].sum()),
            float(np.abs(weekly - actual)[both].sum()),
            int(both.sum()),
        )

    def __add__(self, other: "ForecastErrors") -> "ForecastErrors":
        return ForecastErrors(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def numbers(self) -> np.ndarray:
        """Return all sums in one row, the 2 * horizon + 7 numbers of which `of_numbers` makes them again."""
        return np.concatenate([np.atleast_1d(np.asarray(value, dtype=np.float64)) for value in vars(self).values()])

    @staticmethod
    def of_numbers(numbers: np.ndarray, horizon: int) -> "ForecastErrors":
        """Return the sums in a row that `numbers` returned."""
        squared, size, relative, relative_values, compared, naive, compared_values = numbers[2 * horizon :].tolist()
        return ForecastErrors(
            numbers[:horizon].astype(np.int64),
            numbers[horizon : 2 * horizon],
            squared,
            size,
            relative,
            int(relative_values),
            compared,
            naive,
            int(compared_values),
        )

    def figures(self) -> dict[str, float | None]:
        """Return the figures; None where the samples do not define one."""
        number = int(self.values.sum())
        skill = _ratio(self.compared, self.naive)
        return {
            "mae": _ratio(self.absolute.sum(), number),
            "rmse": None if not number else float(np.sqrt(self.squared / number)),
            "wape": _ratio(self.absolute.sum(), self.size),
            "mase": _ratio(self.relative, self.relative_values),
            "skill": None if skill is None else 1 - skill,
        }

    def steps(self) -> list[float | None]:
        """Return the mean absolute error of each step of the horizon."""
        return [_ratio(total, number) for total, number in zip(self.absolute, self.values, strict=True)]


def _ratio(total: Any, number: Any) -> float | None:
    return float(total / number) if number else None


def interval_figures(lower: np.ndarray, upper: np.ndarray, actual: np.ndarray) -> dict[str, float | None]:
    """Return the share of values inside of their intervals and the mean width; None if intervals are infinite.

    Args:
        lower: lower ends, in the data's own unit, one row per sample.
        upper: upper ends.
        actual: what came of the forecasts.
    """
    width = upper - lower
    if not width.size or np.isinf(width).any():
        return {"coverage": None, "width": None}
    return {"coverage": float(((lower <= actual) & (actual <= upper)).mean()), "width": float(width.mean())}
