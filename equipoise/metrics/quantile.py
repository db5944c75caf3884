"""Metrics of models that forecast quantiles, and metrics of numbers applied to their medians."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.metrics.base import AnyMetric, Metric, MetricFunction, SetMetric
from equipoise.metrics.predictions import Predictions
from equipoise.quantiles import Pinball


@dataclass(frozen=True)
class _OfQuantiles:
    """A function of quantiles and targets, as a function of a model's outputs and targets."""

    function: Callable[[Pinball, Tensor, Tensor], Tensor]
    pinball: Pinball | None = None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        assert self.pinball is not None
        return self.function(self.pinball, self.pinball.ordered(output), target.reshape(len(target), -1))


@dataclass(frozen=True)
class _OfMedians:
    """A function of numbers and targets, applied to the medians among a model's outputs."""

    function: Callable[..., Any]
    pinball: Pinball

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        return self.function(self.pinball.point(output), target)


@dataclass(frozen=True)
class _ComputedOfMedians:
    """The same for a function of predictions."""

    compute: Callable[[Predictions], Any]
    pinball: Pinball

    def __call__(self, predictions: Predictions) -> Any:
        output, _ = predictions.raw
        medians = {**predictions.arrays, "outputs": self.pinball.point(output).numpy()}
        return self.compute(Predictions(medians, predictions.outputs))


def _loss(pinball: Pinball, quantiles: Tensor, target: Tensor) -> Tensor:
    return pinball(quantiles.flatten(1), target)


def _coverage(pinball: Pinball, quantiles: Tensor, target: Tensor) -> Tensor:
    """Return the share of the numbers of each sample between the lowest and the highest quantile."""
    inside = (quantiles[..., 0] <= target) & (target <= quantiles[..., -1])
    return inside.to(quantiles.dtype).mean(-1)


def _width(pinball: Pinball, quantiles: Tensor, target: Tensor) -> Tensor:
    return (quantiles[..., -1] - quantiles[..., 0]).mean(-1)


QUANTILE: tuple[Metric, ...] = (
    Metric(
        "pinball",
        _OfQuantiles(_loss),
        higher_is_better=False,
        bounds=(0.0, inf),
        targets="quantiles",
        summary="The mean pinball loss of the quantiles; lower is better.",
    ),
    Metric(
        "coverage",
        _OfQuantiles(_coverage),
        bounds=(0.0, 1.0),
        targets="quantiles",
        summary="The share of targets between the lowest and the highest quantile; not the first metric.",
    ),
    Metric(
        "interval-width",
        _OfQuantiles(_width),
        higher_is_better=False,
        bounds=(0.0, inf),
        targets="quantiles",
        summary="The mean distance from the lowest to the highest quantile; not the first metric.",
    ),
)

NOT_FIRST = ("coverage", "interval-width")
"""Metrics that say nothing about a model without each other: the widest intervals have the best coverage."""


def fitted(metric: AnyMetric, pinball: Pinball | None) -> AnyMetric:
    """Return a metric for the outputs of a model that forecasts quantiles, or as it is if the model does not.

    Args:
        metric: the metric.
        pinball: the quantiles, if the model forecasts them.
    """
    if pinball is None:
        if metric.targets == "quantiles":
            raise EquipoiseError(f"the metric {metric.name!r} scores quantiles, so it needs loss = 'pinball'")
        return metric
    if isinstance(metric, Metric) and isinstance(metric.function, _OfQuantiles):
        return replace(metric, function=replace(metric.function, pinball=pinball))
    if metric.targets != "numbers":
        return metric
    if isinstance(metric, SetMetric):
        return replace(metric, compute=_ComputedOfMedians(metric.compute, pinball))
    of_medians: MetricFunction = _OfMedians(metric.function, pinball)
    return replace(metric, function=of_medians)
