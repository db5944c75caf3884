"""The scores that clients reported for their models, and the figures and tables made from them."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from equipoise.evaluation.scoreboard import Scoreboard
from equipoise.flower.codec import RejectedMessage
from equipoise.metrics import Metric
from equipoise.storage.model_kinds import COLUMNS, SCORED

_MOST = 10**12  # largest plausible number of samples, and largest plausible score
_SIZES = ("train", "validation", "test")


class ReportedScores:
    """The scores of the last evaluation, by the clients' names."""

    def __init__(self, metric: Metric, select: str = "validation"):
        self.metric, self.select = metric, select
        self.malicious: frozenset[str] = frozenset()
        "names of the malicious clients, whose scores count in no figure"
        self.rows: dict[str, dict[str, list[float]]] = {}
        self.adapted: dict[str, int] = {}
        "number of samples through a backward pass to make the models that were scored, by client"
        self.unseen: set[str] = set()
        "names of the clients that do not train"

    def clear(self) -> None:
        """Remove all scores."""
        self.rows, self.adapted, self.unseen = {}, {}, set()

    def add(self, name: str, scores: Mapping[str, Tensor], adapted: int, unseen: bool) -> None:
        """Add a client's scores; raise RejectedMessage if they are impossible.

        Args:
            name: the client's name.
            scores: sizes of its splits, and one row of scores per kind of model.
            adapted: number of samples through a backward pass to make the models.
            unseen: whether the client does not train.
        """
        self._check(scores)
        self.rows[name] = {kind: values.tolist() for kind, values in scores.items()}
        self.adapted[name] = adapted
        if unseen:
            self.unseen.add(name)

    def _check(self, scores: Mapping[str, Tensor]) -> None:
        if "sizes" not in scores or not bool(((scores["sizes"] >= 0) & (scores["sizes"] < _MOST)).all()):
            raise RejectedMessage("scores", "impossible sizes of splits")
        _, validation, test = scores["sizes"].tolist()
        for kind in scores.keys() - {"sizes"}:
            row = scores[kind].numpy()
            if np.isfinite(row).tolist() != [validation > 0] * 2 + [test > 0] * 2 or np.isinf(row).any():
                raise RejectedMessage(
                    "scores", f"{kind}: NaN or infinity where there are samples, or scores where there are none"
                )
            finite = row[np.isfinite(row)]
            negative = (finite < 0).any() and self.metric.name in ("accuracy", "rmse", "mse")
            if (np.abs(finite) > _MOST).any() or negative:
                raise RejectedMessage("scores", f"{kind}: impossible scores")
            if self.metric.name == "accuracy" and (finite[1::2] > 1).any():
                raise RejectedMessage("scores", f"{kind}: an accuracy above 1")

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
        return Scoreboard(self.metric, validates, tests, scored, self.select)

    def _table(self, kind: str, names: list[str]) -> np.ndarray | None:
        if not any(kind in self.rows[name] for name in names):
            return None
        missing = [np.nan] * len(COLUMNS)
        return np.array([self.rows[name].get(kind, missing) for name in names])

    def summary(self) -> dict[str, Any]:
        """Return the figures for summary.json."""
        found: dict[str, Any] = self.board().summary()
        if newcomers := self.names(unseen=True):
            cost = {"clients": len(newcomers), "adaptation_samples": self.samples(unseen=True)}
            found["unseen"] = {**cost, **self.board(unseen=True).summary()}
        return found

    def samples(self, unseen: bool = False) -> int:
        """Return the number of samples through a backward pass to make the models of these clients."""
        return sum(self.adapted[name] for name in self.names(unseen))

    def tables(self) -> tuple[tuple[str, ...], dict[str, frozenset[str]], dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return what clients.csv contains.

        Returns:
            The clients' names in order, the names of the unseen and of the malicious clients, the sizes of the
            clients' splits, and one table of scores per kind of model.
        """
        names = tuple(sorted(self.rows))
        position = {name: i for i, name in enumerate(names)}
        tables: dict[str, np.ndarray] = {}
        for unseen in (False, True):
            rows = [position[name] for name in self.names(unseen)]
            for kind, table in self.board(unseen).tables().items():
                tables.setdefault(kind, np.full((len(names), len(COLUMNS)), np.nan))[rows] = table
        sizes = np.array([self.rows[name]["sizes"] for name in names], dtype=np.int64).reshape(-1, len(_SIZES))
        marks = {"unseen": frozenset(self.unseen), "malicious": self.malicious}
        return names, marks, {k: sizes[:, i] for i, k in enumerate(_SIZES)}, tables

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        # JSON has no NaN, which is the score of an empty split.
        rows = json.loads(json.dumps(self.rows), parse_constant=lambda word: None if word == "NaN" else word)
        return {"rows": rows, "adapted": self.adapted, "unseen": sorted(self.unseen)}

    def restore(self, facts: dict[str, Any]) -> None:
        """Take back what was saved."""
        self.adapted, self.unseen = facts["adapted"], set(facts["unseen"])
        self.rows = {
            name: {kind: [np.nan if v is None else float(v) for v in values] for kind, values in row.items()}
            for name, row in facts["rows"].items()
        }
