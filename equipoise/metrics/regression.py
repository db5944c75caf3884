"""Metrics of models that predict numbers."""

from math import inf

import torch
from torch import Tensor

from equipoise.losses import squared_error
from equipoise.metrics.base import Metric, SetMetric
from equipoise.metrics.predictions import Predictions

_SCALE = 1e4
_POSITIVE = (0.0, inf)


def _absolute_error(output: Tensor, target: Tensor) -> Tensor:
    return (output.reshape(len(target), -1) - target.reshape(len(target), -1)).abs().mean(-1)


def _r2(predictions: Predictions) -> float:
    """Return R², the mean over the targets that vary; NaN if none varies, as with a single sample."""
    from torchmetrics.functional.regression import r2_score  # importing it takes a second

    output, target = predictions.numbers
    varies = (target != target[:1]).any(0)
    if not varies.any():
        return torch.nan
    output, target = output[:, varies], target[:, varies]
    # torchmetrics takes sums of squares below 1e-4 for zero, so the targets' unit must not matter.
    mean = target.mean(0)
    scale = _SCALE / (target - mean).square().mean(0).sqrt()
    return float(r2_score((output - mean) * scale, (target - mean) * scale))


REGRESSION: tuple[Metric | SetMetric, ...] = (
    Metric(
        "rmse",
        squared_error,
        higher_is_better=False,
        finish=lambda mean: mean**0.5,
        undo=lambda score: score**2,
        bounds=_POSITIVE,
        targets="numbers",
        summary="The root of the mean squared error; lower is better.",
    ),
    Metric(
        "mse",
        squared_error,
        higher_is_better=False,
        bounds=_POSITIVE,
        targets="numbers",
        summary="The mean squared error; lower is better.",
    ),
    Metric(
        "mae",
        _absolute_error,
        higher_is_better=False,
        bounds=_POSITIVE,
        targets="numbers",
        summary="The mean absolute error; lower is better.",
    ),
    SetMetric(
        "r2",
        _r2,
        "outputs",
        bounds=(-inf, 1.0),
        targets="numbers",
        summary="The coefficient of determination, mean over the numbers of a sample.",
    ),
)
