"""The scores of many clients' models, and the figures computed from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.data.statistics import gini
from equipoise.metrics import Metric
from equipoise.storage.model_kinds import COLUMNS, HYBRIDS, SCORED


def score_row(scores: np.ndarray, cut: int, metric: Metric) -> np.ndarray:
    """Return one client's row of scores, with NaN for an empty split.

    Args:
        scores: array (2, n) of the loss and the metric of each sample.
        cut: number of validation samples, which come first; the others are test samples.
        metric: the metric.
    """
    found = np.full(len(COLUMNS), np.nan)
    for column, values in ((0, scores[:, :cut]), (2, scores[:, cut:])):
        if values.shape[1]:
            loss, mean = values.mean(axis=1)
            found[column : column + 2] = loss, metric.finish(mean)
    return found


@dataclass(frozen=True)
class Scoreboard:
    """Scores of each kind of model, one row per client."""

    metric: Metric
    validates: np.ndarray
    "mask of the clients that have validation samples and count in figures"
    tests: np.ndarray
    "mask of the clients that have test samples and count in figures"
    scored: Mapping[str, np.ndarray]
    "table of scores of each kind of model, for the kinds in SCORED that exist"
    select: str = "validation"
    'samples on which the hybrid model is chosen, "validation" or "test"'

    def tables(self) -> dict[str, np.ndarray]:
        """Return the table of scores of each kind of model, including the hybrid model if it exists."""
        tables = {kind: self.scored[kind] for kind in SCORED if kind in self.scored}
        if {"personal", "global"} <= tables.keys() and self._chooses.any():
            better = np.where(self.takes_global()[:, None], tables["global"], tables["personal"])
            tables[HYBRIDS[self.select]] = better
        return tables

    @property
    def _chooses(self) -> np.ndarray:
        return self.validates if self.select == "validation" else self.tests

    def takes_global(self) -> np.ndarray:
        """Return a mask of the clients whose hybrid model is the global one, because it scores better for them."""
        column = COLUMNS.index(f"{self.select}_metric")
        return np.asarray(self.metric.better(self.scored["global"][:, column], self.scored["personal"][:, column]))

    def summary(self) -> dict[str, Any]:
        """Return the figures of each kind of model."""
        return {
            kind: summarize(table[self.tests, 2:], table[self.validates, 1], self.metric)
            for kind, table in self.tables().items()
        }


def summarize(test: np.ndarray, validation: np.ndarray, metric: Metric) -> dict[str, float | None]:
    """Return figures over clients, in which every client counts once.

    A client whose score is NaN makes the figure None, which is null in JSON.

    Args:
        test: array (clients, 2) of the test loss and the test score.
        validation: the validation scores.
        metric: the metric of the scores.
    """
    if not len(test):
        return {}
    loss, score = test[:, 0], test[:, 1]
    worst_first = np.sort(score) if metric.higher_is_better else -np.sort(-score)
    tenth = max(1, round(0.1 * len(test)))
    name, finite = metric.name, np.isfinite(score).all()
    figures = {
        name: score.mean(),
        f"{name}_std": score.std(),
        **({"mse": (score**2).mean()} if name == "rmse" else {}),
        f"{name}_variance": score.var(),
        "loss": loss.mean(),
        "loss_variance": loss.var(),
        "worst_decile": worst_first[:tenth].mean() if finite else np.nan,
        "best_decile": worst_first[-tenth:].mean() if finite else np.nan,
        "gini": gini(score) if finite else np.nan,
    }
    if len(validation):
        figures[f"validation_{name}"] = validation.mean()
    return {key: float(value) if np.isfinite(value) else None for key, value in figures.items()}
