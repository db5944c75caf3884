"""Metrics: scores of a model, as a mean over samples or computed from all samples together."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.metrics.predictions import Need, Predictions, keep
from equipoise.torch_device import one_thread, widened

MetricFunction = Callable[[Tensor, Tensor], Any]
Targets = Literal["classes", "numbers", "quantiles", "any"]
"""The targets that a metric is for."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Metric:
    """A score of a model's outputs.

    The function returns one value per sample, of which the mean is taken, or one number for all samples together.
    """

    name: str
    function: MetricFunction
    "takes outputs and targets"
    higher_is_better: bool = True
    finish: Callable[[Any], Any] = _same
    "is applied to the mean over samples, such as the square root of RMSE"
    undo: Callable[[Any], Any] | None = None
    "the inverse of `finish`; without it, a finished mean cannot be pooled over clients"
    bounds: tuple[float, float] = (-inf, inf)
    "the smallest and the largest possible score"
    targets: Targets = "any"
    "the targets that it is for"
    summary: str = ""
    "what it is, in one sentence, for `equipoise list metrics`"

    def better(self, a: Any, b: Any) -> Any:
        """Tell whether a is strictly better than b."""
        return a > b if self.higher_is_better else a < b

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        """Return one value per sample."""
        try:
            return torch.as_tensor(self.function(output, target))
        except Exception as error:  # whatever the user's function raises
            raise EquipoiseError(f"the metric {self.name!r} fails: {type(error).__name__}: {error}") from error

    def score(self, output: Tensor, target: Tensor) -> float:
        """Return the score of these outputs."""
        return float(self.finish(widened(self.each(output, target)).mean()))

    def pooled(self, scores: np.ndarray, sizes: np.ndarray) -> float:
        """Return the score on the samples of all clients together.

        Args:
            scores: the score of each client.
            sizes: the number of samples of each client.
        """
        undo = _same if self.finish is _same else self.undo
        return np.nan if undo is None else float(self.finish((undo(scores) * sizes).sum() / sizes.sum()))


@dataclass(frozen=True)
class SetMetric:
    """A score that needs all samples together, because it is not a mean over samples."""

    name: str
    compute: Callable[[Predictions], Any]
    "returns a number, NaN if the samples do not define it; or an array, if it is not one number"
    need: Need
    "what is kept of predictions for it"
    higher_is_better: bool = True
    bounds: tuple[float, float] = (-inf, inf)
    targets: Targets = "any"
    form: Literal["number", "class", "matrix"] = "number"
    "one number, one number per class, or one per pair of classes"
    most_classes: int | None = None
    "largest number of classes for which it is computed"
    summary: str = ""
    "what it is, in one sentence"

    def better(self, a: Any, b: Any) -> Any:
        """Tell whether a is strictly better than b."""
        return a > b if self.higher_is_better else a < b

    def score(self, output: Tensor, target: Tensor) -> float:
        """Return the score of these outputs."""
        kept = {name: t.cpu().numpy() for name, t in keep({self.need}, output, target).items()}
        return float(self.value(Predictions(kept, output.shape[-1])))

    def value(self, predictions: Predictions) -> np.ndarray:
        """Return the score of these predictions.

        It is NaN where the samples do not define it, and infinite on the bad side if outputs are NaN or infinite: a
        client whose model diverged must not look like a client whose samples are too few.
        """
        if self.need != "classes" and not predictions.finite:
            return np.array(-inf if self.higher_is_better else inf)
        with one_thread():
            value = np.asarray(self.compute(predictions), dtype=np.float64)
        return value.clip(*self.bounds)  # rounding may go beyond them


AnyMetric = Metric | SetMetric


def whole_set(metric: Metric) -> SetMetric:
    """Return the metric of a function that returns one number for all samples together."""

    def compute(predictions: Predictions) -> float:
        try:
            return float(metric.finish(metric.function(*predictions.raw)))
        except Exception as error:  # whatever the user's function raises
            shapes = " and targets ".join(str(tuple(t.shape)) for t in predictions.raw)
            raise EquipoiseError(
                f"the metric {metric.name!r} fails on outputs {shapes}: {type(error).__name__}: {error}; "
                "where it is not defined, it must return NaN"
            ) from error

    return SetMetric(metric.name, compute, "outputs", metric.higher_is_better, metric.bounds, metric.targets)
