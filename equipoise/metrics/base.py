"""Metrics: scores of a model on samples, by name or of the user's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.losses import Each, check_squared, compared_outputs, squared_error


@dataclass(frozen=True)
class Metric:
    """A score: the mean of `each` over samples, then `finish` (the square root of RMSE)."""

    name: str
    each: Each
    higher_is_better: bool = True
    finish: Callable[[Any], Any] = lambda mean: mean

    def better(self, a: Any, b: Any) -> Any:
        """Tell whether a is strictly better than b."""
        return a > b if self.higher_is_better else a < b


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    right = (compared_outputs(output, target).argmax(-1) == target).to(output.dtype)
    return right if right.ndim == 1 else right.mean(-1)


METRICS = {
    "accuracy": Metric("accuracy", _accuracy),
    "mse": Metric("mse", squared_error, higher_is_better=False),
    "rmse": Metric("rmse", squared_error, higher_is_better=False, finish=lambda mean: mean**0.5),
}


def fitting_metric(metric: str | Metric | None, loss: Any, output: Tensor, target: Tensor) -> Metric:
    """Return a metric, or raise an error if it does not fit the model and the data.

    Args:
        metric: the metric or its name; by default accuracy, or RMSE for numbers.
        loss: the loss or its name.
        output: outputs of the model for some samples.
        target: targets of these samples.
    """
    if metric is None:
        metric = "rmse" if loss == "squared" or target.is_floating_point() else "accuracy"
    if isinstance(metric, Metric):
        value = metric.each(output, target)
        if value.shape != (len(target),):
            raise EquipoiseError(
                f"the metric {metric.name!r} returns shape {tuple(value.shape)}; it must be one value per sample"
            )
        return metric
    if not isinstance(metric, str) or metric not in METRICS:
        raise EquipoiseError(
            f"unknown metric {metric!r}; available: {', '.join(METRICS)}, "
            "or equipoise.Metric(name, function, higher_is_better)"
        )
    if metric in ("rmse", "mse"):
        check_squared(output, target)
    return METRICS[metric]
