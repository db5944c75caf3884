"""Checks that metrics fit a model's outputs and the targets."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.metrics.base import AnyMetric, Metric, SetMetric, whole_set
from equipoise.metrics.collection import MetricCollection
from equipoise.metrics.lookup import METRICS, MetricLike, find_metrics
from equipoise.metrics.quantile import fitted
from equipoise.quantiles import Pinball

# What functions raise where they are not defined, as on two samples of the same class; anything else is a mistake.
_UNDEFINED = (ValueError, ArithmeticError)


def fitting_metrics(
    given: MetricLike | Sequence[MetricLike] | None,
    loss: Any,
    output: Tensor,
    target: Tensor,
    pinball: Pinball | None = None,
) -> MetricCollection:
    """Return metrics, or raise an error if one does not fit the model and the data.

    Args:
        given: a metric or several, each by name, as a `Metric` or as a function; by default accuracy, or RMSE for
            numbers, or the pinball loss for quantiles.
        loss: the loss or its name.
        output: outputs of the model for some samples.
        target: targets of these samples.
        pinball: the quantiles that the outputs are, if the loss is the pinball loss.
    """
    found = () if given is None else find_metrics(given)
    if not found:
        of_numbers = "rmse" if pinball is None else "pinball"
        found = (METRICS[of_numbers if loss == "squared" or target.is_floating_point() else "accuracy"],)
    fitting = (_fitting(metric, output, target, pinball) for metric in found)
    return MetricCollection(tuple(fitting), output.shape[-1])


def _fitting(metric: AnyMetric, output: Tensor, target: Tensor, pinball: Pinball | None) -> AnyMetric:
    metric = fitted(metric, pinball)
    if metric.targets == "classes":
        _check_classes(metric.name, output, target)
    if metric.targets == "numbers":
        _check_numbers(metric.name, output if pinball is None else pinball.point(output), target)
    if isinstance(metric, SetMetric):
        if metric.most_classes is not None and output.shape[-1] > metric.most_classes:
            raise EquipoiseError(
                f"the metric {metric.name!r} is for at most {metric.most_classes} classes, and the model has "
                f"{output.shape[-1]} outputs"
            )
        return metric
    return metric if _returns_one_per_sample(metric, output, target) else whole_set(metric)


def _returns_one_per_sample(metric: Metric, output: Tensor, target: Tensor) -> bool:
    """Tell whether a function returns one value per sample, and not one number for all samples together."""
    try:
        value = torch.as_tensor(metric.function(output, target))
    except _UNDEFINED:
        return False
    except Exception as error:
        raise EquipoiseError(
            f"the metric {metric.name!r} fails on outputs {tuple(output.shape)} and targets {tuple(target.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if value.ndim and value.shape != (len(target),):
        raise EquipoiseError(
            f"the metric {metric.name!r} returns shape {tuple(value.shape)}; it must be one number, or one value per "
            "sample"
        )
    return value.ndim == 1


def _check_classes(name: str, output: Tensor, target: Tensor) -> None:
    per_sample = target.ndim == 1 and output.ndim in (2, 3)
    per_position = target.ndim == 2 and target.shape == output.shape[:-1]
    if target.is_floating_point() or not (per_sample or per_position) or output.shape[-1] < 2:
        kind = str(target.dtype).removeprefix("torch.")
        raise EquipoiseError(
            f"the metric {name!r} needs classes: whole numbers as targets, and at least two outputs; here outputs have "
            f"shape {tuple(output.shape)} and targets {tuple(target.shape)}, {kind}; "
            f"for numbers: {_names('numbers')}"
        )


def _check_numbers(name: str, output: Tensor, target: Tensor) -> None:
    if output.numel() != target.numel():
        raise EquipoiseError(
            f"the metric {name!r} compares numbers, but the model gives {output[0].numel()} per sample and the targets "
            f"have {target[0].numel()}; for classes: {_names('classes')}"
        )


def _names(targets: str) -> str:
    return ", ".join(metric.name for metric in METRICS.values() if metric.targets == targets)
