"""Checks of what is read from a file of records: tables and plots rely on the form of its figures."""

from collections.abc import Mapping
from typing import Any

from equipoise.storage.model_kinds import KINDS, RIGHT, SUCCESS, UNMARKED

_TEXTS = ("metric", "dataset")
_COSTS = ("bytes_up", "bytes_down", "gradient_samples", "seconds")
"""Figures that every comparison of runs shows."""
_TABLES = ("unseen", "privacy", "metrics", "forecast")
_OF_FORECASTS = ("personal", "global", "last", "daily", "weekly")


def check_summary(summary: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the summary of a finished run has what comparisons need, in the right form."""
    for name in (*_TEXTS, *_COSTS):
        if name not in summary:
            raise ValueError(f"its summary is incomplete, it has no {name}")
        fits = isinstance(summary[name], str) if name in _TEXTS else _is_number(summary[name])
        if not fits:
            raise ValueError(f"{name} in its summary has the wrong form")
    for name in (*KINDS, *_TABLES):
        _check_table(summary, name, "")
    for kind in KINDS:
        _check_scores(summary, kind, summary["metric"], "")
        _check_table(summary.get("unseen", {}), kind, "unseen.")
        _check_scores(summary.get("unseen", {}), kind, summary["metric"], "unseen.")
    _check_table(summary, "attack_measure", "")
    if not isinstance(summary.get("malicious", []), list):
        raise ValueError("malicious in its summary is not a list")
    _check_forecasts(summary.get("forecast", {}), "forecast.")
    for name, facts in summary.get("metrics", {}).items():
        if not isinstance(facts, Mapping) or "higher_is_better" not in facts:
            raise ValueError(f"metrics.{name} in its summary has the wrong form")


def _check_table(tables: Mapping[str, Any], name: str, prefix: str) -> None:
    if name in tables and not isinstance(tables[name], Mapping):
        raise ValueError(f"{prefix}{name} in its summary is not a table")


def _check_scores(tables: Mapping[str, Any], kind: str, metric: str, prefix: str) -> None:
    """Check the figures of one kind of model; one that diverged has None."""
    figures = (metric, f"validation_{metric}", f"{metric}_std", f"{metric}_pooled", "worst_decile", "best_decile")
    for name in (*figures, SUCCESS, UNMARKED, RIGHT):
        value = tables.get(kind, {}).get(name)
        if value is not None and not _is_number(value):
            raise ValueError(f"{prefix}{kind}.{name} in its summary is not a number")


def _check_forecasts(tables: Mapping[str, Any], prefix: str) -> None:
    """Check the scores of forecasts: numbers, None where they are not defined, and one list, by step."""
    if not isinstance(tables.get("unit", ""), str):
        raise ValueError(f"{prefix}unit in its summary is not a word")
    for model in _OF_FORECASTS:
        _check_table(tables, model, prefix)
        for name, value in tables.get(model, {}).items():
            values = value if isinstance(value, list) else [value]
            if not all(each is None or _is_number(each) for each in values) or (name == "steps") != (value is values):
                raise ValueError(f"{prefix}{model}.{name} in its summary is not a number")
    _check_table(tables, "unseen", prefix)
    if "unseen" in tables:
        _check_forecasts(tables["unseen"], f"{prefix}unseen.")


def check_curves(curves: Mapping[str, Any]) -> None:
    """Raise a ValueError unless curves have one number or None per round, and names that do not contain each other."""
    if any(not isinstance(values, list) for values in curves.values()):
        raise ValueError("its curves are not lists")
    if len({len(values) for values in curves.values()}) > 1 or (curves and "round" not in curves):
        raise ValueError("its curves have different lengths")
    for name, values in curves.items():
        if any(not _is_number(value) and (value is not None or name == "round") for value in values):
            raise ValueError(f"its curve {name} has values that are not numbers")
        parts = name.split(".")
        for end in range(1, len(parts)):
            if (above := ".".join(parts[:end])) in curves:
                raise ValueError(f"its curve {above} has the name of a group, of which {name} is one")


def check_clients(groups: Mapping[str, Any]) -> None:
    """Raise a ValueError unless there is one number per client in each group of clients."""
    for group, scores in groups.items():
        if not isinstance(scores, Mapping) or not all(map(_is_number, scores.values())):
            raise ValueError(f"its scores of {group} clients are not one number per client")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
