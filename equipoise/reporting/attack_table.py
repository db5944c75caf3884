"""Runs under attack beside their controls: the damage, the success of a backdoor beside its floor, and the price."""

import json
from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import Any

from equipoise.reporting.fitted_table import FittedTable
from equipoise.storage.model_kinds import KINDS, RIGHT, SUCCESS, UNMARKED
from equipoise.storage.run_index import FinishedRun, grouped, higher_is_better

CONTROL = "none"
"""The attack that does nothing."""
USUAL = "weighted-mean"
"""The reducer without a defence."""
_NAMED = ("attack.name", "attack.fraction", "attack.clients", "reducer.name")
"""Settings that are not in a label: its first word, and who is malicious."""
Figures = dict[str, float | None]


def attack_of(run: FinishedRun) -> str | None:
    """Return the name of a run's attack; None without malicious clients."""
    return str(run.config["attack.name"]) if run.summary.get("malicious") and "attack.name" in run.config else None


def defence_of(run: FinishedRun) -> str:
    """Return the name of a run's reducer."""
    return str(run.config.get("reducer.name", USUAL))


def control_key(run: FinishedRun, *apart: str) -> str:
    """Return what a run and its control have in common: all but the attack, and the same malicious clients.

    Args:
        run: the run.
        apart: prefixes of further settings in which they may differ.
    """
    kept = {k: v for k, v in run.config.items() if not k.startswith(("attack.", "engine.", *apart))}
    return json.dumps(
        [kept, run.summary["dataset"], run.summary["metric"], run.summary.get("malicious")], sort_keys=True
    )


def setting_labels(runs: Sequence[FinishedRun], section: str, name: Callable[[FinishedRun], str | None]) -> list[str]:
    """Return the name of each run's attack or reducer, with those of its settings that differ between the runs.

    Args:
        runs: the runs.
        section: the section of the settings, such as "attack".
        name: returns the name.
    """
    prefix = f"{section}."
    keys = sorted({key for run in runs for key in run.config if key.startswith(prefix) and key not in _NAMED})
    values: dict[tuple[str | None, str], set[str]] = {}
    for run, key in ((run, key) for run in runs for key in keys):
        values.setdefault((name(run), key), set()).add(json.dumps(run.config.get(key)))
    found = []
    for run in runs:
        several = [key for key in keys if key in run.config and len(values[name(run), key]) > 1]
        settings = [f"{key.removeprefix(prefix)}={_plain(run.config[key])}" for key in several]
        found.append(" ".join([name(run) or CONTROL, *(text for text in settings if not text.endswith("="))]))
    return found


def _plain(value: Any) -> str:
    """Return a setting's value in a label; of a list of tables, such as rules that come before another, their names."""
    if isinstance(value, (list, tuple)):
        return "+".join(str(each.get("name", each)) if isinstance(each, dict) else str(each) for each in value)
    return str(value)


def attack_rows(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Return one row per attack, reducer, method and kind of model, for runs that differ only in the seed.

    A score is that of the benign clients. A control has the same settings, seed and malicious clients, and the attack
    "none"; its own rows have no damage. Figures are None where no control is among the runs.
    """
    attacked = [run for run in runs if attack_of(run) is not None]
    controls = {control_key(run): run for run in attacked if attack_of(run) == CONTROL}
    usual = {control_key(run, "reducer."): run for run in controls.values() if defence_of(run) == USUAL}
    names = dict(zip(map(id, attacked), setting_labels(attacked, "attack", attack_of), strict=True))
    defences = dict(zip(map(id, attacked), setting_labels(attacked, "reducer", defence_of), strict=True))
    rows = []
    for group in grouped(attacked):
        first = group[0]
        for kind in KINDS:
            if not all(run.summary.get(kind) for run in group):
                continue
            found = [
                _figures(run, controls.get(control_key(run)), usual.get(control_key(run, "reducer.")), kind)
                for run in group
            ]
            row: dict[str, Any] = {
                "algorithm": first.config.get("algorithm.name", first.summary["algorithm"]),
                "attack": names[id(first)],
                "defence": defences[id(first)],
                "malicious": len(first.summary["malicious"]) / int(first.summary["clients"]),
                "model": kind,
                "seeds": len(group),
                "metric": first.summary["metric"],
            }
            for name in found[0]:
                values = [value for each in found if (value := each[name]) is not None]
                row[name] = mean(values) if len(values) == len(found) else None
                row[f"{name}_std"] = stdev(values) if len(values) == len(found) > 1 else None
            rows.append(row)
    return rows


def _figures(run: FinishedRun, control: FinishedRun | None, usual: FinishedRun | None, kind: str) -> Figures:
    """Return the figures of one run and one kind of model."""
    metric, sign = run.summary["metric"], 1 if higher_is_better(run.summary) else -1
    own = run.summary[kind]
    theirs = {} if control is None else control.summary.get(kind, {})
    plain = {} if usual is None else usual.summary.get(kind, {})
    same = control is not None and control.summary.get("attack_measure") == run.summary.get("attack_measure")
    honest = attack_of(run) == CONTROL
    return {
        "score": own.get(metric),
        "pooled": own.get(f"{metric}_pooled"),
        "control": theirs.get(metric),
        "damage": None if honest else _difference(theirs.get(metric), own.get(metric), sign),
        "price": _difference(plain.get(metric), theirs.get(metric), sign),
        "success": own.get(SUCCESS),
        "floor": theirs.get(SUCCESS) if same and not honest else None,
        "unmarked": own.get(UNMARKED),
        "right": own.get(RIGHT),
    }


def telling(rows: Sequence[dict[str, Any]]) -> bool:
    """Tell whether the table says more than the usual one: a control is among the runs, or success was measured."""
    return any(row["control"] is not None or row["success"] is not None for row in rows)


def _difference(a: float | None, b: float | None, sign: int) -> float | None:
    return None if a is None or b is None else sign * (a - b)


_SCORES = ("score", "pooled", "control", "damage", "price")
_RATES = ("success", "floor", "unmarked", "right")
WORDS = ("algorithm", "attack", "defence", "model")
"""Columns with words; all others have figures."""
_TITLES = {"score": "benign", "right": "still right"}
NOTE = (
    "benign: mean over benign clients; pooled: over their test samples; control: the same clients without an attack "
    "(attack.name = 'none'); damage: control minus benign; price: what the defence costs without an attack; success: "
    "part of the benign test samples that the model gives the attackers' label; floor: the same of the control's "
    "model; unmarked: the same samples without the mark; still right: those predicted right in spite of it"
)


def attack_cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and body of the table; columns without any figure are left out."""
    names = [name for name in (*_SCORES, *_RATES) if any(row[name] is not None for row in rows)]
    head = ["algorithm", "attack", "defence", "malicious", "model", *(_TITLES.get(name, name) for name in names)]
    body = []
    for row in rows:
        cells = [row["algorithm"], row["attack"], row["defence"], f"{row['malicious']:.0%}", row["model"]]
        body.append([*cells, *(_cell(row, name) for name in names)])
    return head, body


def _cell(row: dict[str, Any], name: str) -> str:
    value, spread = row[name], row[f"{name}_std"]
    if value is None:
        return "–"
    percent = name in _RATES or row["metric"] == "accuracy"
    scale, digits = (100, 2) if percent else (1, 4)
    return f"{scale * value:.{digits}f}" + ("" if spread is None else f" ± {scale * spread:.{digits}f}")


def attack_table(rows: Sequence[dict[str, Any]]) -> FittedTable:
    """Return the table for the terminal."""
    head, body = attack_cells(rows)
    return FittedTable(head, body, WORDS, ("still right", "pooled", "price", "unmarked"), note=NOTE)
