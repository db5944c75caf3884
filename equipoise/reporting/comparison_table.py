"""Runs side by side, as tables."""

import csv
import io
import json
from statistics import mean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from equipoise.model_kinds import HYBRIDS, KINDS
from equipoise.storage.run_index import FinishedRun, grouped

FAIRNESS = {
    "spread": "{metric}_std",
    "worst": "worst_decile",
    "best": "best_decile",
    "gini": "gini",
    "variance": "{metric}_variance",
    "loss_variance": "loss_variance",
}
"""What tells how evenly a method serves its clients, under the names of the columns."""


PRIVACY = {"epsilon_release": "ε msg", "epsilon_run": "ε run", "delta": "δ"}
"""What a run guarantees its clients, under the names of the columns."""


def compare(runs: list[FinishedRun]) -> list[dict[str, Any]]:
    """A row for all runs that differ only in the seed, each figure with its mean and spread over them."""
    groups = grouped(runs)
    shown = _differences([group[0] for group in groups])
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
            fields = {kind: metric} | {f"{kind}_{short}": field for short, field in FAIRNESS.items()}
            for short, field in ((short, field.format(metric=metric)) for short, field in fields.items()):
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
        for field in ("bytes_up", "bytes_down", "gradient_samples", "seconds"):
            row[field] = mean(run.summary[field] for run in group)
        rows.append(row)
    _tell_twins_apart(rows, [group[0] for group in groups])
    return rows


def _tell_twins_apart(rows: list[dict[str, Any]], firsts: list[FinishedRun]) -> None:
    """Rows that would read alike show every setting in which they differ."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for i, row in enumerate(rows):
        alike.setdefault((row["algorithm"], row["data"], row["settings"]), []).append(i)
    for twins in alike.values():
        if len(twins) > 1:
            keys = _differences([firsts[i] for i in twins])
            for i in twins:
                more = " ".join(f"{_short(k)}={firsts[i].config.get(k, 'none')}" for k in keys)
                rows[i]["settings"] = f"{rows[i]['settings']} {more}".strip()


def told_apart(runs: list[FinishedRun], prefixes: tuple[str, ...]) -> list[str]:
    """Of each run, the settings under these prefixes that are not the same in all of them."""
    shown = [k for k in _differences(runs) if k.startswith(prefixes)]
    return [" ".join(f"{_short(k)}={run.config[k]}" for k in shown if k in run.config) for run in runs]


def _short(key: str) -> str:
    """A setting's name in tables: `lam`, `partition`, `partition.beta`, `attack`, `attack.fraction`."""
    return key.removeprefix("algorithm.").removeprefix("data.").removesuffix(".name").removesuffix(".kind")


def _unseen(summary: dict[str, Any], metric: str) -> float | None:
    """The score of clients that took no part: of the adapted model, else of the global one."""
    scores = summary.get("unseen", {})
    value: float | None = scores.get("personal", scores.get("global", {})).get(metric)
    return value


def _differences(runs: list[FinishedRun]) -> list[str]:
    """Settings that are not the same in all runs, apart from the names, which have columns."""
    keys = sorted({key for run in runs for key in run.config})
    skip = ("seed", "algorithm.name", "data.name")
    return [k for k in keys if k not in skip and _differs(k, runs)]


def _differs(key: str, runs: list[FinishedRun]) -> bool:
    """Does it tell runs apart? A setting that only one reducer has, say, does not: the reducer's name does."""
    section = key.rpartition(".")[0]
    named = "data.partition.kind" if section.startswith("data.partition") else f"{section}.name"
    values: dict[str, set[str]] = {}
    for run in runs:
        own = "" if key == named else json.dumps(run.config.get(named))
        values.setdefault(own, set()).add(json.dumps(run.config.get(key)))
    return any(len(found) > 1 for found in values.values())


_ALWAYS = ("data.", "model.", "attack.", "reducer.", "privacy.", "select", "rounds", "participation")


def _common(name: str, first: FinishedRun, groups: list[list[FinishedRun]]) -> tuple[str, ...]:
    """Prefixes of settings worth showing: an algorithm's own only where it stands with several values of its own."""
    own = [{k: v for k, v in g[0].config.items() if k.startswith("algorithm.")} for g in groups]
    same = {json.dumps(o, sort_keys=True) for o in own if o.get("algorithm.name") == name}
    return ("",) if len(same) > 1 else _ALWAYS


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
