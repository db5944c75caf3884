"""Tables that compare runs, for the terminal and as text."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from equipoise.reporting.comparison import PRIVACY
from equipoise.reporting.fitted_table import FittedTable
from equipoise.reporting.forecast_table import forecast_cells, forecast_note, has_forecasts
from equipoise.storage.model_kinds import HYBRIDS, KINDS


def _figure(value: float | None, spread: float | None, metric: str) -> str:
    if value is None:
        return "–"
    scale, digits = (100, 2) if metric == "accuracy" else (1, 4)
    return f"{value * scale:.{digits}f}" + (f" ± {spread * scale:.{digits}f}" if spread is not None else "")


def _cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and body of the usual table: scores of the models, spread over clients, and traffic."""
    unseen = any(row["unseen"] is not None for row in rows)
    private = any(row["private"] for row in rows)
    accuracies = all(row["metric"] == "accuracy" for row in rows)
    unit = " %" if accuracies and not unseen and not private else ""  # otherwise the table is too wide
    rare = (HYBRIDS["test"], "consensus")  # few runs have these kinds
    there = [kind for kind in KINDS if any(row[kind] is not None for row in rows)]
    kinds = [kind for kind in KINDS if kind in there or not (private or kind in rare)]
    shown = {"pooled": "pooled", "spread": "spread", "worst": "worst tenth"}
    if private:
        del shown["spread"]
    if not _has_pooled(rows):
        del shown["pooled"]
    head = ["algorithm", *(f"{kind}{unit}" for kind in kinds), *shown.values()]
    head += [*([f"unseen{unit}"] if unseen else []), *(PRIVACY.values() if private else []), "sent MB"]
    optional = {
        "data": len({row["data"] for row in rows}) > 1,
        "settings": any(row["settings"] for row in rows),
        "seeds": any(row["seeds"] > 1 for row in rows),
    }
    body = []
    for row in rows:
        kind = "personal" if row["personal"] is not None else "global"
        cells = [row["algorithm"], *(str(row[k]) for k, wanted in optional.items() if wanted)]
        cells += [_figure(row[k], row[f"{k}_std"], row["metric"]) for k in kinds]
        cells += [_figure(row[f"{kind}_{k}"], _over_seeds(row, f"{kind}_{k}"), row["metric"]) for k in shown]
        cells += [_figure(row["unseen"], row["unseen_std"], row["metric"])] if unseen else []
        cells += _private_cells(row) if private else []
        body.append([*cells, f"{(row['bytes_up'] + row['bytes_down']) / 1e6:.1f}"])
    return [head[0], *(k for k, wanted in optional.items() if wanted), *head[1:]], body


def _over_seeds(row: dict[str, Any], key: str) -> float | None:
    """Return the standard deviation of a figure over seeds, if there are several."""
    deviation: float | None = row.get(f"{key}_std")
    return deviation


def _has_pooled(rows: list[dict[str, Any]]) -> bool:
    """Tell whether any row has pooled scores; runs of older versions have none."""
    return any(row[f"{kind}_pooled"] is not None for row in rows for kind in KINDS)


def _private_cells(row: dict[str, Any]) -> list[str]:
    if not row["private"]:
        return ["∞", "∞", "–"]
    cells = ["∞" if row[k] is None else f"{row[k]:.3g}" for k in PRIVACY]
    if "privacy_unit" in row:  # another promise than that of the other rows
        cells[:2] = [f"{cell} per {row['privacy_unit']}" for cell in cells[:2]]
    return cells


_SPREAD = "spread: standard deviation over clients; "
NOTE = "worst tenth: mean of the worst 10% of clients (personal model, else global)"
_POOLED_NOTE = "pooled: on the test samples of all clients together; "


_ORACLE_NOTE = "; oracle: the better of personal and global by the test samples, which nobody can know in advance"
_CONSENSUS_NOTE = "; consensus: personal models with the part that all clients agreed on in place of the client's own"
_UNSEEN_NOTE = "; unseen: clients that took no part in training, after the result was adapted to their data"


def _note(rows: list[dict[str, Any]]) -> str:
    names = {row["data"] for row in rows}
    data = f"Data: {names.pop()}. " if len(names) == 1 and names != {""} else ""
    percent = "Accuracies in %. " if any(row["metric"] == "accuracy" for row in rows) else ""
    notes = [_UNSEEN_NOTE] if any(row["unseen"] is not None for row in rows) else []
    notes += [_ORACLE_NOTE] if any(row[HYBRIDS["test"]] is not None for row in rows) else []
    notes += [_CONSENSUS_NOTE] if any(row["consensus"] is not None for row in rows) else []
    notes += [_PRIVACY_NOTE] if any(row["private"] for row in rows) else []
    notes += [_SAMPLE_NOTE] if any("privacy_unit" in row for row in rows) else []
    spread = "" if any(row["private"] for row in rows) else _SPREAD
    pooled = _POOLED_NOTE if _has_pooled(rows) else ""
    return data + percent + pooled + spread + NOTE + "".join(notes)


_PRIVACY_NOTE = "; ε, δ: privacy guarantee of a client, for one message and for the whole run (∞: none)"


_SAMPLE_NOTE = "; per sample: the guarantee of one sample of a client, not of all its data"


_FAIRNESS_NOTE = (
    "score: mean over clients; pooled: on the test samples of all clients together; "
    "worst, best: mean over the 10% of clients with the worst and the best score; variance, loss variance: over "
    "clients, of scores and of test losses; Gini: 0 if all clients have the same score"
)


def _fair_note(rows: list[dict[str, Any]]) -> str:
    """Return the meaning of the columns, and the privacy guarantees, for which the table has no room."""
    guarantees = [
        f"{row['algorithm']} {row['settings']}".strip() + ": " + ", ".join(f"{k} {v}" for k, v in shown)
        for row in rows
        if row["private"] and (shown := zip(PRIVACY.values(), _private_cells(row), strict=True))
    ]
    return _FAIRNESS_NOTE + "".join(f"; {text}" for text in guarantees)


def _fair_cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and body of the table on fairness between clients."""
    settings = any(row["settings"] for row in rows)
    pooled = ["pooled"] if _has_pooled(rows) else []
    head = ["algorithm", *(["settings"] if settings else []), "model", "score", *pooled, "worst", "best"]
    body = []
    for row in rows:
        for kind in (kind for kind in KINDS if row[kind] is not None):
            cells = [row["algorithm"], *([row["settings"]] if settings else []), kind]
            cells.append(_figure(row[kind], row[f"{kind}_std"], row["metric"]))
            keys = [f"{kind}_{k}" for k in (*pooled, "worst", "best")]
            cells += [_figure(row[key], _over_seeds(row, key), row["metric"]) for key in keys]
            small = [f"{kind}_{k}" for k in ("variance", "gini", "loss_variance")]
            body.append([*cells, *(_figure(row[key], _over_seeds(row, key), "") for key in small)])
    return [*head, "variance", "Gini", "loss variance"], body


def _metric_cells(rows: list[dict[str, Any]], others: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return head and body of the table of all metrics: one row per run, kind of model and metric.

    What is the same as in the row above is left blank.
    """
    settings = any(row["settings"] for row in rows)
    head = ["algorithm", *(["settings"] if settings else []), "model", "metric", "mean", "pooled", "spread", "clients"]
    body = []
    for row in rows:
        first = [row["algorithm"], *([row["settings"]] if settings else [])]
        for kind in (kind for kind in KINDS if row[kind] is not None):
            names = {row["metric"]: kind, **{name: f"{kind}_{name}" for name in others if name != row["metric"]}}
            for metric, key in names.items():
                if row[key] is None and row.get(f"{key}_clients") is None:
                    continue
                cells = [_figure(row[key], row[f"{key}_std"], metric)]
                cells += [_figure(row[f"{key}_{k}"], None, metric) for k in ("pooled", "spread")]
                count = row.get(f"{key}_clients")
                model = kind if metric == row["metric"] else ""
                body.append([*first, model, metric, *cells, "all" if count is None else f"{count:g}"])
                first = [""] * len(first)
    return head, body


_METRICS_NOTE = (
    "mean: over clients, each counting once; pooled: on the test samples of all clients together; spread: standard "
    "deviation over clients; clients: those whose test samples define the metric; accuracies in %"
)


def metrics_table(rows: list[dict[str, Any]], others: list[str]) -> FittedTable:
    """Return a table of all metrics for the terminal.

    Args:
        rows: the rows of a comparison.
        others: names of the metrics beside the first one.
    """
    head, body = _metric_cells(rows, others)
    return FittedTable(head, body, WORDS, ("clients", "spread"), below="settings", note=_METRICS_NOTE)


def cells(rows: list[dict[str, Any]], fairness: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the titles of the columns, and one line of texts per row (with `fairness`, per kind of model)."""
    return (_fair_cells if fairness else _cells)(rows)


def note(rows: list[dict[str, Any]], fairness: bool = False) -> str:
    """Return the meaning of the columns, in words."""
    return _fair_note(rows) if fairness else _note(rows)


WORDS = ("algorithm", "data", "settings", "model", "metric")
"""Columns with words; all others have figures."""


def as_table(rows: list[dict[str, Any]], fairness: bool = False) -> FittedTable:
    """Return the rows of a comparison as a table for the terminal."""
    head, body = cells(rows, fairness)
    secondary = ("variance", "Gini", "best") if fairness else ("spread", "worst tenth", "δ", "ε msg", "sent MB")
    # Long settings are wrapped or below a row, never cut off, because they distinguish the runs.
    return FittedTable(head, body, WORDS, secondary, below="settings", note=note(rows, fairness))


def as_text(rows: list[dict[str, Any]], format: str, fairness: bool = False, others: Sequence[str] = ()) -> str:
    """Return the rows of a comparison as text.

    Args:
        rows: the rows.
        format: json, csv or md (Markdown).
        fairness: whether the table is about fairness between clients.
        others: names of the metrics beside the first one, which in Markdown have a table of their own.
    """
    if format != "md":
        return rows_as_text(rows, format)
    tables = [markdown(*cells(rows, fairness), note(rows, fairness))]
    tables += [markdown(*_metric_cells(rows, list(others)), _METRICS_NOTE)] if others else []
    if has_forecasts(rows) and not fairness:
        tables.append(markdown(*forecast_cells(rows), forecast_note(rows)))
    return "\n\n".join(tables)


def rows_as_text(rows: list[dict[str, Any]], format: str) -> str:
    """Return dictionaries with the same keys as JSON or CSV."""
    if format == "json":
        return json.dumps(rows, indent=2)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip()


def markdown(head: list[str], body: list[list[str]], note: str) -> str:
    """Return a table in Markdown, with a note below it."""
    lines = [head, ["---"] * len(head), *body]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{table}\n\n{note}"
