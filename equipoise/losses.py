"""Losses and metrics, and checks that they fit a model's outputs and the targets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.errors import EquipoiseError

Each = Callable[[Tensor, Tensor], Tensor]  # (output, target) -> one number per sample


@dataclass(frozen=True)
class Loss:
    """A loss as its mean over a batch and, if available, as one value per sample."""

    mean: Callable[[Tensor, Tensor], Tensor]
    each: Each | None

    def of_each(self, output: Tensor, target: Tensor) -> Tensor:
        """Return one value per sample, if need be as the mean over that sample alone."""
        if self.each is not None:
            return self.each(output, target)
        return torch.stack([self.mean(output[i : i + 1], target[i : i + 1]) for i in range(len(target))])


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


def _squared(output: Tensor, target: Tensor) -> Tensor:
    return (output.reshape(len(target), -1) - target.reshape(len(target), -1)).square().mean(-1)


def _asked_for(output: Tensor, target: Tensor) -> Tensor:
    """Return the outputs to compare with the targets: at the last position if there is one target for all positions."""
    return output[:, -1] if output.ndim == 3 and target.ndim == 1 else output


def _mean_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(_asked_for(output, target).flatten(0, -2), target.flatten())


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return one value per sample, in fewer traced operations than F.cross_entropy."""
    logs = _asked_for(output, target).log_softmax(-1)
    each = -logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return each if each.ndim == 1 else each.mean(-1)


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    right = (_asked_for(output, target).argmax(-1) == target).to(output.dtype)
    return right if right.ndim == 1 else right.mean(-1)


LOSSES = {
    "cross-entropy": Loss(_mean_cross_entropy, _cross_entropy),
    "squared": Loss(lambda o, t: _squared(o, t).mean(), _squared),
}
METRICS = {
    "accuracy": Metric("accuracy", _accuracy),
    "mse": Metric("mse", _squared, higher_is_better=False),
    "rmse": Metric("rmse", _squared, higher_is_better=False, finish=lambda mean: mean**0.5),
}


def fitting_loss(loss: str | Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> Loss:
    """Return a loss, or raise an error if it does not fit the model and the data.

    Args:
        loss: the name of a loss, or a function.
        output: outputs of the model for some samples.
        target: targets of these samples.
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise EquipoiseError(f"unknown loss {loss!r}; available: {', '.join(LOSSES)}, or a function")
        if loss == "squared":
            _check_squared(output, target)
        else:
            _check_classes(output, target)
        return LOSSES[loss]
    try:
        value = loss(output, target)
    except Exception as error:
        raise EquipoiseError(
            f"the loss fails on outputs {tuple(output.shape)} and targets {tuple(target.shape)}: {error}"
        ) from error
    if value.ndim == 0:
        return Loss(loss, None)
    if value.shape == (len(target),):
        return Loss(lambda o, t: loss(o, t).mean(), loss)
    raise EquipoiseError(
        f"the loss returns shape {tuple(value.shape)}; it must be a mean, (), or one value per sample, {(len(target),)}"
    )


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
        _check_squared(output, target)
    return METRICS[metric]


def _check_classes(output: Tensor, target: Tensor) -> None:
    one_a_sample = target.ndim == 1 and output.ndim in (2, 3)
    one_a_position = target.ndim == 2 and target.shape == output.shape[:-1]
    if target.is_floating_point() or not (one_a_sample or one_a_position):
        raise EquipoiseError(
            "the loss 'cross-entropy' needs one whole number per sample as its target, or one per position if the "
            f"model gives one output per position; here outputs have shape {tuple(output.shape)} and targets "
            f"{tuple(target.shape)}; for other numbers use 'squared'"
        )


def _check_squared(output: Tensor, target: Tensor) -> None:
    if output.numel() != target.numel():
        raise EquipoiseError(
            f"the model gives {output[0].numel()} numbers per sample and the targets have {target[0].numel()}; "
            "squared errors need equally many"
        )
