"""The report of an audit: figures of each attack, beside the accounted epsilon."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.privacy.epsilon_bounds import EpsilonBound
from equipoise.privacy.membership import MembershipScores
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import AUDIT

RATES = (0.001, 0.01)
"""False positive rates at which true positive rates are reported."""
_POINTS = 400
"""Largest number of points of a ROC curve in a file."""


@dataclass(frozen=True)
class Attack:
    """An attack, and what it found."""

    name: str
    unit: str
    "sample or client"
    target: str
    "what was attacked: personal models, the global one, uploads"
    scores: MembershipScores
    bound: EpsilonBound
    covered: bool
    "whether the guarantee of a run with privacy covers what was attacked"
    accounted: float | None
    "epsilon of the guarantee; None if there is none"
    gaussian: bool = False
    "whether the mechanism alone was attacked, so that its noise is known to be normal"

    @property
    def least_epsilon(self) -> float:
        """Return the lower bound of epsilon that is best for what was attacked."""
        return self.bound.gaussian_epsilon if self.gaussian else self.bound.epsilon

    @property
    def contradicts(self) -> bool:
        """Tell whether more was learned than the guarantee allows."""
        return self.covered and self.accounted is not None and self.least_epsilon > self.accounted

    def roc(self) -> tuple[list[float], list[float]]:
        """Return false and true positive rates, thinned out where there are many, but not where they are small."""
        false, true = self.scores.roc
        if len(false) > _POINTS:
            places = np.unique(np.geomspace(1, len(false), _POINTS).astype(int) - 1)
            false, true = false[places], true[places]
        return false.tolist(), true.tolist()

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain data; None means infinity, or that there is none."""
        false, true = self.roc()
        return {
            "attack": self.name,
            "unit": self.unit,
            "target": self.target,
            "members": len(self.scores.members),
            "others": len(self.scores.others),
            "auc": self.scores.auc,
            "advantage": self.scores.advantage,
            **{f"tpr_at_{rate:g}": self.scores.true_positives_at(rate) for rate in RATES},
            "epsilon_at_least": _finite(self.bound.epsilon),
            **({"epsilon_at_least_gaussian": _finite(self.bound.gaussian_epsilon)} if self.gaussian else {}),
            "delta": self.bound.delta,
            "confidence": self.bound.confidence,
            "errors": {
                "false_positives": [self.bound.false_positives, self.bound.others],
                "false_negatives": [self.bound.false_negatives, self.bound.members],
            },
            "covered": self.covered,
            "epsilon_accounted": self.accounted,
            "contradicts": self.contradicts,
            "roc": {"fpr": false, "tpr": true},
        }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


@dataclass(frozen=True)
class AuditReport:
    """What all attacks found."""

    method: str
    rounds: int
    runs: int
    "number of shadow runs"
    guarantee: dict[str, Any] | None
    "as in summary.json; None without privacy"
    attacks: list[Attack]
    notes: list[str]
    "what was not attacked, and why"

    @property
    def contradictions(self) -> list[Attack]:
        """Return the attacks that learned more than the guarantee allows."""
        return [attack for attack in self.attacks if attack.contradicts]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "algorithm": self.method,
            "rounds": self.rounds,
            "shadow_runs": self.runs,
            "privacy": self.guarantee,
            "attacks": [attack.as_json() for attack in self.attacks],
            "notes": self.notes,
        }

    def write(self, folder: Path) -> None:
        """Write audit.json into a run folder."""
        atomic_files.write_json(folder / AUDIT, self.as_json())
