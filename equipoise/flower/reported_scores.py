"""The scores that clients reported for their models, and the figures and tables made from them."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.attacks import SuccessMeasure
from equipoise.evaluation.attack_success import COUNTS
from equipoise.evaluation.forecast_scores import ForecastScores
from equipoise.evaluation.scoreboard import Scoreboard, score_columns
from equipoise.flower.codec import group, named
from equipoise.flower.protocol import SUCCESS_COUNTS
from equipoise.flower.reported_forecasts import ReportedForecasts
from equipoise.flower.score_checks import check_confusion, check_scores, check_success
from equipoise.metrics import MetricCollection, Predictions
from equipoise.storage.model_kinds import SCORED

_SIZES = ("train", "validation", "test")
_CONFUSION = "confusion"
Matrices = dict[str, np.ndarray]
"""Confusion matrix of each kind of model."""


class ReportedPredictions:
    """What the server knows of clients' predictions: their confusion matrices, if they were asked for."""

    def __init__(self, matrices: list[Matrices], outputs: int):
        """Combine the clients.

        Args:
            matrices: the confusion matrices of each client.
            outputs: number of the model's outputs.
        """
        self.matrices, self.outputs = matrices, outputs

    def pooled(self, kinds: np.ndarray, counted: np.ndarray) -> Predictions:
        chosen = [self.matrices[i].get(str(kinds[i])) for i in np.flatnonzero(counted)]
        found = [matrix for matrix in chosen if matrix is not None]
        if not found or len(found) < len(chosen):
            return Predictions({}, self.outputs)
        return Predictions({}, self.outputs, np.sum(found, axis=0))


class ReportedScores:
    """The scores of the last evaluation, by the clients' names."""

    def __init__(
        self,
        metrics: MetricCollection,
        select: str = "validation",
        labels: int = 1,
        least_loss: float = 0.0,
        largest_size: float = math.inf,
        measure: SuccessMeasure | None = None,
        forecasts: ReportedForecasts | None = None,
    ):
        """Create an empty table.

        Args:
            metrics: the metrics of the scores.
            select: the samples on which the hybrid model is chosen, "validation" or "test".
            labels: number of labels of a sample, which has several if it is a text.
            least_loss: the smallest possible loss.
            largest_size: the largest number of samples of a split that a client may report.
            measure: how the success of an attack is measured, if it is.
            forecasts: the table of the errors of forecasts, where samples are windows of time series.
        """
        self.forecasts = forecasts or ReportedForecasts()
        self.measure = measure
        self.success: dict[str, Matrices] = {}
        "counts of the attack's success on each kind of model, by client"
        self.metrics, self.select, self.labels = metrics, select, labels
        self.least_loss, self.largest_size = least_loss, largest_size
        self.malicious: frozenset[str] = frozenset()
        "names of the malicious clients, whose scores count in no figure"
        self.rows: dict[str, dict[str, list[float]]] = {}
        self.confusion: dict[str, Matrices] = {}
        self.adapted: dict[str, int] = {}
        "number of samples through a backward pass to make the models that were scored, by client"
        self.unseen: set[str] = set()
        "names of the clients that do not train"

    def clear(self) -> None:
        """Remove all scores."""
        self.rows, self.confusion, self.adapted, self.unseen, self.success = {}, {}, {}, set(), {}
        self.forecasts.numbers = {}

    def add(
        self,
        name: str,
        scores: Mapping[str, Tensor],
        confusion: Mapping[str, Tensor],
        adapted: int,
        unseen: bool,
        success: Mapping[str, Tensor] | None = None,
        forecasts: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add a client's scores; raise RejectedMessage if they are impossible.

        Args:
            name: the client's name.
            scores: sizes of its splits, and one row of scores per kind of model.
            confusion: the confusion matrix of each kind of model, if they are asked for.
            adapted: number of samples through a backward pass to make the models.
            unseen: whether the client does not train.
            success: counts of an attack's success on each kind of model, if it is measured.
            forecasts: errors of the forecasts of its models and of naive ones, if they were asked for.
        """
        success = success or {}
        check_scores(scores, self.metrics, self.least_loss, self.largest_size)
        kinds = scores.keys() - {"sizes"} if self.metrics.arrays and scores["sizes"][2] else set()
        check_confusion(confusion, kinds, int(scores["sizes"][2]) * self.labels)
        trained = scores.keys() - {"sizes"} if self.measure is not None and not unseen else set()
        check_success(success, trained, int(scores["sizes"][2]))
        self.forecasts.add(name, forecasts or {}, scores.keys() - {"sizes"}, int(scores["sizes"][2]))
        self.success[name] = {kind: counts.numpy() for kind, counts in success.items()}
        self.rows[name] = {kind: values.tolist() for kind, values in scores.items()}
        self.confusion[name] = {kind: matrix.numpy() for kind, matrix in confusion.items()}
        self.adapted[name] = adapted
        if unseen:
            self.unseen.add(name)

    def names(self, unseen: bool) -> list[str]:
        """Return the names of the clients with scores: those that train, or the unseen ones."""
        return sorted(name for name in self.rows if (name in self.unseen) == unseen)

    def board(self, unseen: bool = False) -> Scoreboard:
        """Return the scoreboard of the clients that train, or of the unseen ones."""
        names = self.names(unseen)
        sizes = np.array([self.rows[name]["sizes"] for name in names]).reshape(-1, len(_SIZES))
        found = {kind: self._table(kind, names) for kind in SCORED}
        scored = {kind: table for kind, table in found.items() if table is not None}
        benign = np.array([name not in self.malicious for name in names], dtype=bool)
        validates, tests = benign & (sizes[:, 1] > 0), benign & (sizes[:, 2] > 0)
        kept = None
        if self.metrics.needs:
            kept = ReportedPredictions([self.confusion.get(name, {}) for name in names], self.metrics.outputs)
        counts, marks = {}, self.measure is not None and self.measure.marks
        if self.measure is not None and not unseen:
            none = np.zeros(len(COUNTS), dtype=np.int64)
            for kind in scored:
                counts[kind] = np.array([self.success.get(name, {}).get(kind, none) for name in names])
        return Scoreboard(self.metrics, validates, tests, sizes[:, 2], scored, kept, self.select, counts, marks)

    def _table(self, kind: str, names: list[str]) -> np.ndarray | None:
        if not any(kind in self.rows[name] for name in names):
            return None
        missing = [np.nan] * len(score_columns(self.metrics))
        return np.array([self.rows[name].get(kind, missing) for name in names])

    def summary(self) -> dict[str, Any]:
        """Return the figures for summary.json."""
        found: dict[str, Any] = self.board().full_summary()
        forecasts = self.forecast_scores()
        if newcomers := self.names(unseen=True):
            cost = {"clients": len(newcomers), "adaptation_samples": self.samples(unseen=True)}
            found["unseen"] = {**cost, **self.board(unseen=True).full_summary()}
        return found if forecasts is None else {**found, "forecast": forecasts.summary()}

    def forecast_scores(self) -> ForecastScores | None:
        """Return the scores of the clients' forecasts; None if no client reported any."""
        return self.forecasts.scores(self.unseen, self.malicious)

    def samples(self, unseen: bool = False) -> int:
        """Return the number of samples through a backward pass to make the models of these clients."""
        return sum(self.adapted[name] for name in self.names(unseen))

    def tables(
        self,
    ) -> tuple[
        tuple[str, ...], dict[str, frozenset[str]], dict[str, np.ndarray], dict[str, np.ndarray], tuple[str, ...]
    ]:
        """Return what clients.csv contains.

        Returns:
            The clients' names in order, the names of the unseen and of the malicious clients, the sizes of the
            clients' splits, one table of scores per kind of model, and the names of the scores.
        """
        names, columns = tuple(sorted(self.rows)), score_columns(self.metrics)
        position = {name: i for i, name in enumerate(names)}
        tables: dict[str, np.ndarray] = {}
        for unseen in (False, True):
            rows = [position[name] for name in self.names(unseen)]
            for kind, table in self.board(unseen).tables().items():
                tables.setdefault(kind, np.full((len(names), len(columns)), np.nan))[rows] = table
        sizes = np.array([self.rows[name]["sizes"] for name in names], dtype=np.int64).reshape(-1, len(_SIZES))
        marks = {"unseen": frozenset(self.unseen), "malicious": self.malicious}
        return names, marks, {k: sizes[:, i] for i, k in enumerate(_SIZES)}, tables, columns

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        # JSON has no NaN, which is the score of an empty split.
        rows = json.loads(json.dumps(self.rows), parse_constant=lambda word: None if word == "NaN" else word)
        return {"rows": rows, "adapted": self.adapted, "unseen": sorted(self.unseen)}

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps as tensors."""
        found = self.forecasts.tensors()
        for group_name, by_client in ((_CONFUSION, self.confusion), (SUCCESS_COUNTS, self.success)):
            for name, matrices in by_client.items():
                found |= named({f"{kind}.{name}": torch.from_numpy(m) for kind, m in matrices.items()}, group_name)
        return found

    def restore(self, facts: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take back what was saved."""
        self.adapted, self.unseen = facts["adapted"], set(facts["unseen"])
        self.rows = {
            name: {kind: [np.nan if v is None else float(v) for v in values] for kind, values in row.items()}
            for name, row in facts["rows"].items()
        }
        self.forecasts.restore(tensors)
        self.confusion, self.success = {}, {}
        for group_name, by_client in ((_CONFUSION, self.confusion), (SUCCESS_COUNTS, self.success)):
            for key, matrix in group(tensors, group_name).items():
                kind, _, name = key.partition(".")
                by_client.setdefault(name, {})[kind] = matrix.numpy()
        columns = len(score_columns(self.metrics))
        if any(len(values) != columns for row in self.rows.values() for k, values in row.items() if k != "sizes"):
            self.clear()  # scores by other metrics
