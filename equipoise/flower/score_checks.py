"""Checks of the scores that clients report: what no honest client can send is rejected."""

from collections.abc import Mapping, Set

import numpy as np
from torch import Tensor

from equipoise.evaluation.scoreboard import score_columns
from equipoise.flower.codec import RejectedMessage
from equipoise.metrics import Metric, MetricCollection

_MOST = 10**12  # largest plausible score


def check_scores(
    scores: Mapping[str, Tensor], metrics: MetricCollection, least_loss: float, largest_size: float
) -> None:
    """Raise RejectedMessage if these scores are impossible.

    Args:
        scores: sizes of the client's splits, and one row of scores per kind of model.
        metrics: the metrics of the scores.
        least_loss: the smallest possible loss.
        largest_size: the largest number of samples of a split, because pooled scores count samples.
    """
    if "sizes" not in scores or not bool(((scores["sizes"] >= 0) & (scores["sizes"] <= largest_size)).all()):
        raise RejectedMessage(
            "scores", f"sizes of splits are missing, negative, or above deploy.largest_weight = {largest_size:g}"
        )
    _, validation, test = scores["sizes"].tolist()
    columns, may_be_undefined = score_columns(metrics), _may_be_undefined(metrics)
    low, high = _bounds(metrics, least_loss)
    for kind in scores.keys() - {"sizes"}:
        row = scores[kind].numpy()
        there = np.array([validation > 0] * 2 + [test > 0] * (len(row) - 2))
        finite = np.isfinite(row)
        if np.isinf(row).any() or (finite & ~there).any() or (there & ~finite & ~may_be_undefined).any():
            raise RejectedMessage(
                "scores", f"{kind}: NaN or infinity where there are samples, or scores where there are none"
            )
        impossible = (np.abs(row) > _MOST) | (row < low) | (row > high)
        if impossible.any():
            k = int(impossible.argmax())
            raise RejectedMessage("scores", f"{kind}: {columns[k]} = {row[k]:g} is impossible")


def check_confusion(confusion: Mapping[str, Tensor], kinds: Set[str], labels: int) -> None:
    """Raise RejectedMessage if these confusion matrices are impossible.

    Args:
        confusion: the confusion matrix of each kind of model.
        kinds: the kinds of models that it must be there for.
        labels: the number of labels of the client's test samples.
    """
    if confusion.keys() != kinds:
        raise RejectedMessage("scores", "confusion matrices are missing, or there are too many")
    for kind, matrix in confusion.items():
        # A sum may overflow, but not if no entry is above the number that the sum must be.
        if bool((matrix < 0).any()) or bool((matrix > labels).any()) or int(matrix.sum()) != labels:
            raise RejectedMessage("scores", f"{kind}: the confusion matrix does not sum to the number of test samples")


def check_success(success: Mapping[str, Tensor], kinds: Set[str], test: int) -> None:
    """Raise RejectedMessage if these counts of an attack's success are impossible.

    Args:
        success: the counts of each kind of model.
        kinds: the kinds of models that they must be there for.
        test: the number of the client's test samples.
    """
    if success.keys() != kinds:
        raise RejectedMessage("scores", "counts of the attack's success are missing, or there are too many")
    for kind, counts in success.items():
        samples = int(counts[0])
        if not 0 <= samples <= test or bool((counts < 0).any()) or bool((counts > samples).any()):
            raise RejectedMessage("scores", f"{kind}: the counts of the attack's success are impossible")


def _may_be_undefined(metrics: MetricCollection) -> np.ndarray:
    """Return a mask of the columns whose score a client's samples may not define."""
    undefined = [not isinstance(metric, Metric) for metric in (metrics.first, *metrics.others)]
    per_class = len(metrics.per_class) * metrics.outputs
    return np.array([False, undefined[0], False, *undefined, *[True] * per_class])


def _bounds(metrics: MetricCollection, least_loss: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest possible value of each column."""
    low, high = metrics.first.bounds
    loss = (least_loss, np.inf)
    columns = [loss, (low, high), loss, (low, high), *(metric.bounds for metric in metrics.others)]
    columns += [metric.bounds for metric in metrics.per_class for _ in range(metrics.outputs)]
    return np.array(columns)[:, 0], np.array(columns)[:, 1]
