"""Comparison of runs: one row for all runs that differ only in the seed, with mean and spread of each figure."""

import json
from statistics import mean, stdev
from typing import Any

from equipoise.reporting.forecast_table import forecast_columns
from equipoise.storage.diagnostics import DIAGNOSTICS
from equipoise.storage.model_kinds import KINDS
from equipoise.storage.run_index import FinishedRun, grouped

FAIRNESS = {
    "spread": "{metric}_std",
    "worst": "worst_decile",
    "best": "best_decile",
    "gini": "gini",
    "variance": "{metric}_variance",
    "loss_variance": "loss_variance",
}
"""Columns of the comparison that measure fairness between clients, and the figures of summary.json in them."""

POOLED = {"pooled": "{metric}_pooled", "clients": "{metric}_clients"}
"""Columns of the score on the test samples of all clients together, and of the number of clients in the mean."""

PRIVACY = {"epsilon_release": "ε msg", "epsilon_run": "ε run", "delta": "δ"}
"""Figures of a run's privacy guarantee, and the titles of their columns."""


def compare(runs: list[FinishedRun]) -> list[dict[str, Any]]:
    """Return one row for all runs that differ only in the seed, each figure with its mean and spread."""
    groups = grouped(runs)
    shown = _differences([group[0] for group in groups])
    others, forecasts = other_metrics(runs), forecast_columns(runs)
    rows = []
    for group in groups:
        first = group[0]
        name = first.config.get("algorithm.name", first.summary["algorithm"])
        row: dict[str, Any] = {"algorithm": name, "data": first.summary["dataset"]}
        settings = {
            k: first.config[k] for k in shown if k in first.config and k.startswith(_common(name, first, groups))
        }
        row["settings"] = " ".join(f"{_short(k)}={v}" for k, v in settings.items())
        row["seeds"] = len(group)
        metric = first.summary["metric"]
        row["metric"] = metric
        for kind in KINDS:
            fields = {kind: metric} | {f"{kind}_{short}": field for short, field in (POOLED | FAIRNESS).items()}
            fields = {short: field.format(metric=metric) for short, field in fields.items()}
            for name in others:
                fields |= {f"{kind}_{name}{end}": f"{name}{end}" for end in ("", "_pooled")}
                fields |= {f"{kind}_{name}_spread": f"{name}_std", f"{kind}_{name}_clients": f"{name}_clients"}
            for short, field in fields.items():
                found = [run.summary.get(kind, {}).get(field) for run in group]
                values = [value for value in found if value is not None]
                row[short] = mean(values) if values else None
                row[f"{short}_std"] = stdev(values) if len(values) > 1 else None
        found = [_unseen(run.summary, metric) for run in group]
        values = [value for value in found if value is not None]
        row["unseen"] = mean(values) if values else None
        row["unseen_std"] = stdev(values) if len(values) > 1 else None
        privacy = first.summary.get("privacy", {})
        row |= {"private": bool(privacy)} | {k: privacy.get(k) for k in PRIVACY}
        row |= {"privacy_unit": privacy["unit"]} if "unit" in privacy else {}
        for field in ("bytes_up", "bytes_down", "gradient_samples", "seconds"):
            row[field] = mean(run.summary[field] for run in group)
        row |= forecast_columns(group) or dict.fromkeys(forecasts)
        rows.append(row)
    _distinguish_equal_rows(rows, [group[0] for group in groups])
    return rows


def other_metrics(runs: list[FinishedRun]) -> list[str]:
    """Return the metrics that are one number and were computed beside the first one, in any of the runs."""
    found: dict[str, None] = {}
    for run in runs:
        described: dict[str, dict[str, Any]] = run.summary.get("metrics", {})
        one_number = [name for name, facts in described.items() if facts["higher_is_better"] is not None]
        found |= dict.fromkeys(one_number[1:])
    return list(found)


def diagnostics_in(runs: list[FinishedRun]) -> list[str]:
    """Return the numbers that clients report about their updates, in any of the runs."""
    return sorted({name for run in runs for line in run.metrics for name in line.get(DIAGNOSTICS, {})})


def _distinguish_equal_rows(rows: list[dict[str, Any]], firsts: list[FinishedRun]) -> None:
    """Let rows that would look the same show every setting in which they differ."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for i, row in enumerate(rows):
        alike.setdefault((row["algorithm"], row["data"], row["settings"]), []).append(i)
    for twins in alike.values():
        if len(twins) > 1:
            keys = _differences([firsts[i] for i in twins])
            for i in twins:
                more = " ".join(f"{_short(k)}={firsts[i].config.get(k, 'none')}" for k in keys)
                rows[i]["settings"] = f"{rows[i]['settings']} {more}".strip()


SCENE = ("data.", "attack.", "privacy.")
"""Prefixes of settings that define the problem; methods are compared on the same problem."""


def problem(run: FinishedRun) -> str:
    """Return what a run's figures can be compared with: they have the same problem and metric."""
    setting = {k: v for k, v in run.config.items() if k.startswith(SCENE)}
    return json.dumps([setting, run.summary["dataset"], run.summary["metric"]], sort_keys=True)


def told_apart(runs: list[FinishedRun], prefixes: tuple[str, ...]) -> list[str]:
    """Return, for each run, the settings under these prefixes that differ between the runs."""
    shown = [k for k in _differences(runs) if k.startswith(prefixes)]
    return [" ".join(f"{_short(k)}={run.config[k]}" for k in shown if k in run.config) for run in runs]


def _short(key: str) -> str:
    """Return a setting's name in tables: `lam`, `partition`, `partition.beta`, `attack`, `attack.fraction`."""
    return key.removeprefix("algorithm.").removeprefix("data.").removesuffix(".name").removesuffix(".kind")


def _unseen(summary: dict[str, Any], metric: str) -> float | None:
    """Return the score of clients that took no part in training: of the adapted model, else of the global one."""
    scores = summary.get("unseen", {})
    value: float | None = scores.get("personal", scores.get("global", {})).get(metric)
    return value


def _differences(runs: list[FinishedRun]) -> list[str]:
    """Return the settings that differ between runs, without those that have their own columns."""
    keys = sorted({key for run in runs for key in run.config})
    skip = ("seed", "algorithm.name", "data.name")
    return [k for k in keys if k not in skip and _differs(k, runs)]


def _differs(key: str, runs: list[FinishedRun]) -> bool:
    """Tell whether a setting differs between runs of the same kind.

    A setting that only one reducer has, for example, does not count: the reducer's name shows the difference.
    """
    section = key.rpartition(".")[0]
    named = "data.partition.kind" if section.startswith("data.partition") else f"{section}.name"
    values: dict[str, set[str]] = {}
    for run in runs:
        own = "" if key == named else json.dumps(run.config.get(named))
        values.setdefault(own, set()).add(json.dumps(run.config.get(key)))
    return any(len(found) > 1 for found in values.values())


_ALWAYS = ("data.", "model.", "attack.", "reducer.", "privacy.", "select", "rounds", "participation")


def _common(name: str, first: FinishedRun, groups: list[list[FinishedRun]]) -> tuple[str, ...]:
    """Return the prefixes of settings to show: those of an algorithm only if it was run with several values."""
    own = [{k: v for k, v in g[0].config.items() if k.startswith("algorithm.")} for g in groups]
    same = {json.dumps(o, sort_keys=True) for o in own if o.get("algorithm.name") == name}
    return ("",) if len(same) > 1 else _ALWAYS
