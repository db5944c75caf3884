"""Figures over clients: means, in which every client counts once, and pooled ones, in which every test sample does."""

from typing import Any

import numpy as np

from equipoise.data.statistics import gini
from equipoise.metrics import AnyMetric, Metric, Predictions, SetMetric

POOLED, CLIENTS = "_pooled", "_clients"
"""Endings of the names of figures: pooled over all test samples; number of clients in a mean."""


def summarize(
    test: np.ndarray, validation: np.ndarray, metric: AnyMetric, sizes: np.ndarray | None = None
) -> dict[str, float | None]:
    """Return figures of loss and first metric over clients, in which every client counts once.

    A client whose score is NaN makes the figure None, which is null in JSON. Where the metric may be undefined for a
    client's samples, such a client is left out instead, and the figures say how many count.

    Args:
        test: array (clients, 2) of the test loss and the test score.
        validation: the validation scores.
        metric: the metric of the scores.
        sizes: the number of test samples of each client, for pooled figures.
    """
    if not len(test):
        return {}
    loss, score = test[:, 0], _defined(test[:, 1], metric)
    worst_first = np.sort(score) if metric.higher_is_better else -np.sort(-score)
    tenth = max(1, round(0.1 * len(score)))
    name, finite = metric.name, len(score) > 0 and np.isfinite(score).all()
    pooled = {} if sizes is None else {f"loss{POOLED}": (loss * sizes).sum() / sizes.sum()}
    figures = {
        **mean_figures(test[:, 1], metric, sizes),
        **({"mse": _mean(score**2)} if name == "rmse" else {}),
        f"{name}_variance": score.var() if finite else np.nan,
        "loss": loss.mean(),
        **pooled,
        "loss_variance": loss.var(),
        "worst_decile": worst_first[:tenth].mean() if finite else np.nan,
        "best_decile": worst_first[-tenth:].mean() if finite else np.nan,
        "gini": gini(score) if finite else np.nan,
    }
    if len(validation):
        figures[f"validation_{name}"] = _mean(_defined(validation, metric))
    return as_json(figures)


def mean_figures(scores: np.ndarray, metric: AnyMetric, sizes: np.ndarray | None = None) -> dict[str, Any]:
    """Return mean and spread of a metric over clients and, if it is a mean over samples, the pooled score.

    Args:
        scores: the score of each client.
        metric: the metric.
        sizes: the number of test samples of each client, for the pooled score.
    """
    defined, name = _defined(scores, metric), metric.name
    figures: dict[str, Any] = {name: _mean(defined), f"{name}_std": _std(defined)}
    if sizes is not None and isinstance(metric, Metric):
        figures[name + POOLED] = metric.pooled(scores, sizes)
    return figures | ({name + CLIENTS: len(defined)} if isinstance(metric, SetMetric) else {})


def pooled_figure(metric: SetMetric, predictions: Predictions) -> dict[str, Any]:
    """Return the score of all clients' predictions together; nothing if too little of them is kept."""
    if not predictions.has(metric.need):
        return {}
    value = metric.value(predictions)
    return {metric.name + POOLED: value.astype(np.int64) if metric.form == "matrix" else value}


def class_figures(scores: np.ndarray, metric: SetMetric) -> dict[str, Any]:
    """Return the mean over clients for each class, and the number of clients that have samples of it.

    Args:
        scores: array (clients, classes), NaN where a client has no samples of a class.
        metric: the metric.
    """
    there = ~np.isnan(scores)
    count = there.sum(0)
    mean = np.where(count > 0, np.where(there, scores, 0).sum(0) / np.maximum(count, 1), np.nan)
    return {metric.name: mean, metric.name + CLIENTS: count}


def as_json(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures for JSON: lists in place of arrays, None for what is not a finite number."""
    return {key: _plain(np.asarray(value).tolist()) for key, value in figures.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if np.isfinite(value) else None


def _defined(scores: np.ndarray, metric: AnyMetric) -> np.ndarray:
    return scores[~np.isnan(scores)] if isinstance(metric, SetMetric) else scores


def _mean(scores: np.ndarray) -> Any:
    return scores.mean() if len(scores) else np.nan


def _std(scores: np.ndarray) -> Any:
    return scores.std() if len(scores) and np.isfinite(scores).all() else np.nan
