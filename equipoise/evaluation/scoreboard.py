"""Scores of many clients' models, and the figures that are made of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.data.statistics import gini
from equipoise.losses import Metric
from equipoise.model_kinds import COLUMNS, HYBRIDS, SCORED


def score_row(scores: np.ndarray, cut: int, metric: Metric) -> np.ndarray:
    """One model's row of a board from (loss, metric) of each sample, the first `cut` of them for validation.

    NaN stands where a split is empty.
    """
    found = np.full(len(COLUMNS), np.nan)
    for column, values in ((0, scores[:, :cut]), (2, scores[:, cut:])):
        if values.shape[1]:
            loss, mean = values.mean(axis=1)
            found[column : column + 2] = loss, metric.finish(mean)
    return found


@dataclass(frozen=True)
class Scoreboard:
    """A row of scores a client for each kind of model that there is."""

    metric: Metric
    validates: np.ndarray
    "which clients have validation samples and count"
    tests: np.ndarray
    "which have test samples and count"
    scored: Mapping[str, np.ndarray]
    "the table of each of the kinds in SCORED that there are"
    select: str = "validation"
    "on which samples the hybrid model is chosen"

    def tables(self) -> dict[str, np.ndarray]:
        tables = {kind: self.scored[kind] for kind in SCORED if kind in self.scored}
        if {"personal", "global"} <= tables.keys() and self._chooses.any():
            better = np.where(self.takes_global()[:, None], tables["global"], tables["personal"])
            tables[HYBRIDS[self.select]] = better
        return tables

    @property
    def _chooses(self) -> np.ndarray:
        return self.validates if self.select == "validation" else self.tests

    def takes_global(self) -> np.ndarray:
        """Whose hybrid model is the global one: better on the client's samples to choose by, where it has any."""
        column = COLUMNS.index(f"{self.select}_metric")
        return np.asarray(self.metric.better(self.scored["global"][:, column], self.scored["personal"][:, column]))

    def summary(self) -> dict[str, Any]:
        return {
            kind: summarize(table[self.tests, 2:], table[self.validates, 1], self.metric)
            for kind, table in self.tables().items()
        }


def summarize(test: np.ndarray, validation: np.ndarray, metric: Metric) -> dict[str, float | None]:
    """Figures over clients, each counting once, from their (loss, score) on test and their score on validation.

    A client whose score is NaN spoils the figure, as it should; in JSON that is null.
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
