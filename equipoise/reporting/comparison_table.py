"""Runs side by side, as tables."""

import csv
import io
import json
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from equipoise.model_kinds import HYBRIDS, KINDS
from equipoise.reporting.comparison import PRIVACY


def _figure(value: float | None, spread: float | None, metric: str) -> str:
    if value is None:
        return "–"
    scale, digits = (100, 2) if metric == "accuracy" else (1, 4)
    return f"{value * scale:.{digits}f}" + (f" ± {spread * scale:.{digits}f}" if spread is not None else "")


def _cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """What people read: the models' scores, how far clients lie apart, and what was sent."""
    unseen = any(row["unseen"] is not None for row in rows)
    private = any(row["private"] for row in rows)
    accuracies = all(row["metric"] == "accuracy" for row in rows)
    unit = " %" if accuracies and not unseen and not private else ""  # else they would not fit
    rare = (HYBRIDS["test"], "consensus")  # few have them
    there = [kind for kind in KINDS if any(row[kind] is not None for row in rows)]
    kinds = [kind for kind in KINDS if kind in there or not (private or kind in rare)]
    shown = {"spread": "spread", "worst": "worst tenth"}
    if private:
        del shown["spread"]
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
        cells += [_figure(row[f"{kind}_{k}"], None, row["metric"]) for k in shown]
        cells += [_figure(row["unseen"], row["unseen_std"], row["metric"])] if unseen else []
        cells += _private_cells(row) if private else []
        body.append([*cells, f"{(row['bytes_up'] + row['bytes_down']) / 1e6:.1f}"])
    return [head[0], *(k for k, wanted in optional.items() if wanted), *head[1:]], body


def _private_cells(row: dict[str, Any]) -> list[str]:
    if not row["private"]:
        return ["∞", "∞", "–"]
    return ["∞" if row[k] is None else f"{row[k]:.3g}" for k in PRIVACY]


_SPREAD = "spread: standard deviation over clients; "
NOTE = "worst tenth: mean of the worst 10% of clients (personal model, else global)"


_ORACLE_NOTE = "; oracle: the better of personal and global as the test samples have it, which nobody can know"
_CONSENSUS_NOTE = "; consensus: personal models with what all agree on in the place of the client's own copy"
_UNSEEN_NOTE = "; unseen: clients that took no part in training, after adapting the result to their own data"


def _note(rows: list[dict[str, Any]]) -> str:
    names = {row["data"] for row in rows}
    data = f"Data: {names.pop()}. " if len(names) == 1 and names != {""} else ""
    percent = "Accuracies in %. " if any(row["metric"] == "accuracy" for row in rows) else ""
    notes = [_UNSEEN_NOTE] if any(row["unseen"] is not None for row in rows) else []
    notes += [_ORACLE_NOTE] if any(row[HYBRIDS["test"]] is not None for row in rows) else []
    notes += [_CONSENSUS_NOTE] if any(row["consensus"] is not None for row in rows) else []
    notes += [_PRIVACY_NOTE] if any(row["private"] for row in rows) else []
    spread = "" if any(row["private"] for row in rows) else _SPREAD
    return data + percent + spread + NOTE + "".join(notes)


_PRIVACY_NOTE = "; ε, δ: how well a client is hidden by noise, for one message and for all of the run (∞: not at all)"


_FAIRNESS_NOTE = (
    "worst, best tenth: mean over the 10% of clients with the lowest and the highest score; variance: over clients, "
    "of their scores and of their test losses; Gini: 0 where all clients' scores are equal"
)


def _fair_note(rows: list[dict[str, Any]]) -> str:
    """Beside what the columns mean, the guarantees, for which there is no room in them."""
    told = [
        f"{row['algorithm']} {row['settings']}".strip() + ": " + ", ".join(f"{k} {v}" for k, v in shown)
        for row in rows
        if row["private"] and (shown := zip(PRIVACY.values(), _private_cells(row), strict=True))
    ]
    return _FAIRNESS_NOTE + "".join(f"; {text}" for text in told)


def _fair_cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """How evenly each kind of model serves the clients."""
    settings = any(row["settings"] for row in rows)
    head = ["algorithm", *(["settings"] if settings else []), "model", "score", "worst", "best"]
    body = []
    for row in rows:
        for kind in (kind for kind in KINDS if row[kind] is not None):
            cells = [row["algorithm"], *([row["settings"]] if settings else []), kind]
            cells.append(_figure(row[kind], row[f"{kind}_std"], row["metric"]))
            cells += [_figure(row[f"{kind}_{k}"], None, row["metric"]) for k in ("worst", "best")]
            small = [row[f"{kind}_{k}"] for k in ("variance", "gini", "loss_variance")]
            body.append([*cells, *("–" if v is None else f"{v:.4f}" for v in small)])
    return [*head, "variance", "Gini", "loss variance"], body


def as_table(rows: list[dict[str, Any]], fairness: bool = False) -> Table:
    head, body = (_fair_cells if fairness else _cells)(rows)
    note = _fair_note(rows) if fairness else _note(rows)
    table = Table(caption=escape(note), caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    words = ("algorithm", "data", "settings", "model")
    for column in head:
        # What tells runs apart is wrapped where it must be, never cut off.
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    for cells in body:
        table.add_row(*cells)
    return table


def as_text(rows: list[dict[str, Any]], format: str, fairness: bool = False) -> str:
    if format == "json":
        return json.dumps(rows, indent=2)
    if format == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().rstrip()
    head, body = (_fair_cells if fairness else _cells)(rows)
    lines = [head, ["---"] * len(head), *body]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{table}\n\n{_fair_note(rows) if fairness else _note(rows)}"
