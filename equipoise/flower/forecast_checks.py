"""Checks of the errors of forecasts that clients report: what no honest client can send is rejected."""

from collections.abc import Collection, Mapping

import numpy as np
from torch import Tensor

from equipoise.evaluation.forecast_errors import ForecastErrors
from equipoise.evaluation.forecast_scores import NAIVE
from equipoise.flower.codec import RejectedMessage

_MOST = 10**12  # largest plausible error of a value, and largest plausible value
_ROUNDING = 1e-9


def check_forecasts(forecasts: Mapping[str, Tensor], models: Collection[str], horizon: int, test: int) -> None:
    """Raise RejectedMessage if these numbers are impossible.

    Args:
        forecasts: of each model and each naive forecast the sums of `ForecastErrors`, and the coverage and the width of
            intervals.
        models: the kinds of models that they must be there for.
        horizon: number of values that a sample forecasts.
        test: the number of the client's test samples.
    """
    if forecasts.keys() != {*models, *NAIVE} or not test:
        raise RejectedMessage("scores", "errors of forecasts are missing, or there are too many")
    every = {kind: numbers.numpy() for kind, numbers in forecasts.items()}
    for kind, numbers in every.items():
        coverage, width = numbers[-2:].tolist()
        wrong = _impossible(numbers[:-2], horizon, test, every=kind in models)
        if wrong is None and kind == "weekly":
            wrong = _not_itself(ForecastErrors.of_numbers(numbers[:-2], horizon))
        if wrong is None and not _possible_interval(coverage, width, allowed=kind in models):
            wrong = "the coverage or the width of its intervals"
        if wrong is not None:
            raise RejectedMessage("scores", f"forecasts of the {kind} model: {wrong} is impossible")
    # Whatever model forecasts all samples, these are facts of the samples.
    facts = [_of_samples(ForecastErrors.of_numbers(every[kind][:-2], horizon)) for kind in models]
    if any(other != facts[0] for other in facts):
        raise RejectedMessage("scores", "the forecasts of different models are not of the same samples")


def _impossible(numbers: np.ndarray, horizon: int, test: int, every: bool) -> str | None:
    """Return which of these sums is impossible; None if all are possible.

    Args:
        numbers: the sums.
        horizon: number of values that a sample forecasts.
        test: the number of test samples.
        every: whether all values are forecast.
    """
    if not np.isfinite(numbers).all() or (numbers < 0).any():
        return "a number that is negative, NaN or infinite"
    counts = numbers[[*range(horizon), -4, -1]]
    if (counts != np.rint(counts)).any() or (counts > test * horizon).any():
        return "a number of values"
    errors = ForecastErrors.of_numbers(numbers, horizon)
    total, absolute = int(errors.values.sum()), float(errors.absolute.sum())
    if (errors.values > test).any() or (every and total < test * horizon):
        return "a number of values"
    if errors.relative_values > total or errors.compared_values > total:
        return "a number of values"
    pairs = [*zip(errors.absolute, errors.values, strict=True), (errors.size, total)]
    pairs += [(errors.relative, errors.relative_values)]
    pairs += [(each, errors.compared_values) for each in (errors.compared, errors.naive)]
    if any(value > _MOST * number for value, number in pairs):
        return "a sum"
    # Cauchy and Schwarz, and the square of a sum of numbers that are not negative.
    if absolute**2 > total * errors.squared * (1 + _ROUNDING) or errors.squared > absolute**2 * (1 + _ROUNDING):
        return "the sum of squared errors"
    if errors.compared > absolute * (1 + _ROUNDING):
        return "the sum of errors where there is a weekly forecast"
    return None


def _not_itself(weekly: ForecastErrors) -> str | None:
    """Return what is wrong if the weekly naive forecast is not as good as itself."""
    sums = (float(weekly.absolute.sum()), weekly.compared, weekly.naive)
    same = np.allclose(sums, weekly.naive, rtol=_ROUNDING, atol=0)
    return None if same and weekly.compared_values == weekly.values.sum() else "its comparison with itself"


def _possible_interval(coverage: float, width: float, allowed: bool) -> bool:
    """Tell whether these are figures of intervals; both are NaN where there are none."""
    if np.isnan(coverage) and np.isnan(width):
        return True
    return bool(allowed and 0 <= coverage <= 1 and 0 <= width <= _MOST)


def _of_samples(errors: ForecastErrors) -> tuple[float, ...]:
    """Return the sums that depend on the samples alone, if all of them are forecast."""
    return errors.size, errors.relative_values, errors.naive, errors.compared_values
