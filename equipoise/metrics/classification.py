"""Metrics of classifiers. Those that torchmetrics has are its, except where it gives a number for what is undefined.

A client's test samples often lack classes. torchmetrics then counts such a class as 0, or warns; here it does not
count, and a metric that the present classes do not define is NaN.
"""

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
from torch import Tensor

from equipoise.losses import compared_outputs
from equipoise.metrics.base import Metric, SetMetric
from equipoise.metrics.predictions import Need, Predictions

BINS = 15
"""Number of bins of the calibration error, as in Guo et al. (2017)."""
_MOST_CLASSES = 1024  # a matrix of all pairs of classes is made for every client
_MOST_SHOWN = 256  # and here it is written to files
_UNIT = (0.0, 1.0)


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    right = (compared_outputs(output, target).argmax(-1) == target).to(output.dtype)
    return right if right.ndim == 1 else right.mean(-1)


def _recalls(predictions: Predictions) -> np.ndarray:
    """Return the recall of each class, NaN for classes without samples."""
    right, labels = predictions.confusion.diagonal(), predictions.confusion.sum(1)
    return np.where(labels > 0, right / np.maximum(labels, 1), np.nan)


def _balanced_accuracy(predictions: Predictions) -> float:
    """Return the mean recall of the classes that have samples."""
    recalls = _recalls(predictions)
    return float(recalls[~np.isnan(recalls)].mean())


def _macro_f1(predictions: Predictions) -> float:
    """Return the mean F1 score of the classes that have samples or were predicted."""
    right = predictions.confusion.diagonal()
    both = predictions.confusion.sum(0) + predictions.confusion.sum(1)
    return float((2 * right[both > 0] / both[both > 0]).mean())


def _mean_over_classes(predictions: Predictions, name: str) -> float:
    """Return the mean of a score of one class against the others; NaN if the samples are all of one class.

    Args:
        predictions: the predictions.
        name: name of torchmetrics' function for two classes.
    """
    from torchmetrics.functional import classification  # importing it takes a second

    labels, present = predictions.labels, predictions.labels.unique()
    if len(present) < 2:
        return np.nan
    score = getattr(classification, name)
    own = (score(predictions.probabilities[:, c], (labels == c).long(), validate_args=False) for c in present)
    return float(np.mean([float(value) for value in own]))


def _calibration_error(predictions: Predictions) -> float:
    from torchmetrics.functional.classification import binary_calibration_error

    right = (predictions.classes == predictions.labels).long()
    return float(binary_calibration_error(predictions.confidence, right, BINS, "l1", validate_args=False))


def _classes(name: str, compute: Callable[[Predictions], Any], need: Need, **more: Any) -> SetMetric:
    return SetMetric(name, compute, need, targets="classes", **{"bounds": _UNIT, **more})


CLASSIFICATION: tuple[Metric | SetMetric, ...] = (
    Metric("accuracy", _accuracy, bounds=_UNIT, targets="classes", summary="The share of right predictions."),
    _classes(
        "balanced-accuracy",
        _balanced_accuracy,
        "classes",
        most_classes=_MOST_CLASSES,
        summary="The mean recall of the classes that have samples.",
    ),
    _classes(
        "macro-f1",
        _macro_f1,
        "classes",
        most_classes=_MOST_CLASSES,
        summary="The mean F1 score of the classes that have samples or are predicted.",
    ),
    _classes(
        "auroc",
        lambda p: _mean_over_classes(p, "binary_auroc"),
        "outputs",
        summary="The area under the ROC curve, one class against the others, mean over classes.",
    ),
    _classes(
        "average-precision",
        lambda p: _mean_over_classes(p, "binary_average_precision"),
        "outputs",
        summary="The area under the precision-recall curve, mean over classes.",
    ),
    _classes(
        "calibration-error",
        _calibration_error,
        "confidence",
        higher_is_better=False,
        summary="The expected calibration error of the predicted class; lower is better.",
    ),
    _classes(
        "per-class-recall",
        _recalls,
        "classes",
        form="class",
        most_classes=_MOST_SHOWN,
        summary="The recall of each class (not the first metric).",
    ),
    _classes(
        "confusion-matrix",
        lambda p: p.confusion,
        "classes",
        bounds=(0.0, inf),
        form="matrix",
        most_classes=_MOST_SHOWN,
        summary="The number of samples of each class and predicted class (not the first metric).",
    ),
)
