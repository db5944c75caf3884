"""The scores of many clients' models, and the figures computed from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from equipoise.evaluation.attack_success import success_figures
from equipoise.evaluation.figures import as_json, class_figures, mean_figures, pooled_figure, summarize
from equipoise.evaluation.kept_predictions import PooledPredictions
from equipoise.executors.sample_scores import SampleScores
from equipoise.metrics import AnyMetric, Metric, MetricCollection, Predictions, SetMetric
from equipoise.storage.model_kinds import COLUMNS, HYBRIDS, SCORED


def score_columns(metrics: MetricCollection) -> tuple[str, ...]:
    """Return the columns of a client's scores."""
    return (*COLUMNS, *metrics.more_columns)


def score_row(scores: SampleScores, cut: int, metrics: MetricCollection) -> np.ndarray:
    """Return one client's row of scores, with NaN for an empty split and where a metric is not defined.

    Args:
        scores: the scores of each sample.
        cut: number of validation samples, which come first; the others are test samples.
        metrics: the metrics.
    """
    row = np.full(len(COLUMNS) + len(metrics.more_columns), np.nan)
    for column, samples in ((0, slice(0, cut)), (2, slice(cut, None))):
        values = scores.values[:, samples]
        if not values.shape[1]:
            continue
        means = values.mean(axis=1)
        kept = None if scores.predictions is None else scores.predictions[samples]
        row[column : column + 2] = means[0], _score(metrics.first, metrics, means, kept)
        if column == 2 and metrics.more_columns:
            others = [_score(metric, metrics, means, kept) for metric in (*metrics.others, *metrics.per_class)]
            row[len(COLUMNS) :] = np.concatenate([np.atleast_1d(value) for value in others])
    return row


def _score(metric: AnyMetric, metrics: MetricCollection, means: np.ndarray, kept: Predictions | None) -> Any:
    """Return a client's score, from the means over samples of loss and metrics, or from what is kept of predictions."""
    if isinstance(metric, Metric):
        return metric.finish(means[1 + metrics.means.index(metric)])
    assert kept is not None
    return metric.value(kept)


@dataclass(frozen=True)
class Scoreboard:
    """Scores of each kind of model, one row per client."""

    metrics: MetricCollection
    validates: np.ndarray
    "mask of the clients that have validation samples and count in figures"
    tests: np.ndarray
    "mask of the clients that have test samples and count in figures"
    sizes: np.ndarray
    "number of test samples of each client"
    scored: Mapping[str, np.ndarray]
    "table of scores of each kind of model, for the kinds in SCORED that exist"
    predictions: PooledPredictions | None = None
    "the predictions, if a metric needs those of all clients together"
    select: str = "validation"
    'samples on which the hybrid model is chosen, "validation" or "test"'
    counts: Mapping[str, np.ndarray] = field(default_factory=dict)
    "counts of an attack's success on each kind of model, one row per client, if it is measured"
    marks: bool = False
    "whether that attack has a trigger"

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
        """Return a mask of the clients whose hybrid model is the global one, because it is better for them.

        Validation samples are often so few that both models get the same number of them right, so the loss decides.
        The oracle has the better score by definition.
        """
        if self.select == "test":
            column = COLUMNS.index("test_metric")
            metric = self.metrics.first
            return np.asarray(metric.better(self.scored["global"][:, column], self.scored["personal"][:, column]))
        column = COLUMNS.index("validation_loss")
        return np.asarray(self.scored["global"][:, column] < self.scored["personal"][:, column])

    def summary(self) -> dict[str, Any]:
        """Return the figures of each kind of model that are one number."""
        return {kind: self._figures(kind, table) for kind, table in self.tables().items()}

    def full_summary(self) -> dict[str, Any]:
        """Return the figures of each kind of model, including those of every class."""
        arrays = {kind: self._arrays(kind, table) for kind, table in self.tables().items()}
        return {kind: figures | arrays[kind] for kind, figures in self.summary().items()}

    def _figures(self, kind: str, table: np.ndarray) -> dict[str, Any]:
        metrics, sizes = self.metrics, self.sizes[self.tests]
        test, validation = table[self.tests, 2:], table[self.validates, 1]
        figures = summarize(test[:, :2], validation, metrics.first, sizes)
        if not len(test):
            return figures
        more: dict[str, Any] = {}
        pooled = self._pooled(kind)
        for column, metric in enumerate((metrics.first, *metrics.others), start=1):
            more |= mean_figures(test[:, column], metric, sizes) if metric is not metrics.first else {}
            if isinstance(metric, SetMetric) and pooled is not None:
                more |= pooled_figure(metric, pooled)
        return figures | as_json(more) | self._success(kind)

    def _success(self, kind: str) -> dict[str, Any]:
        """Return the figures of an attack's success on the models of the benign clients, if it is measured."""
        if kind in HYBRIDS.values() and {"personal", "global"} <= self.counts.keys():
            counts = np.where(self.takes_global()[:, None], self.counts["global"], self.counts["personal"])
        elif kind in self.counts:
            counts = self.counts[kind]
        else:
            return {}
        return success_figures(counts[self.tests], self.marks)

    def _arrays(self, kind: str, table: np.ndarray) -> dict[str, Any]:
        metrics = self.metrics
        arrays: dict[str, Any] = {}
        pooled = self._pooled(kind) if metrics.arrays and self.tests.any() else None
        if pooled is None:
            return {}
        first = len(COLUMNS) + len(metrics.others)
        for metric in metrics.arrays:
            if metric.form == "class":
                arrays |= class_figures(table[self.tests, first : first + metrics.outputs], metric)
                first += metrics.outputs
            arrays |= pooled_figure(metric, pooled)
        return as_json(arrays)

    def _pooled(self, kind: str) -> Predictions | None:
        """Return the predictions of all counted clients together, if they are kept."""
        if self.predictions is None:
            return None
        kinds = np.full(len(self.sizes), kind, dtype=object)
        if kind in HYBRIDS.values():
            kinds = np.where(self.takes_global(), "global", "personal")
        return self.predictions.pooled(kinds, self.tests)
