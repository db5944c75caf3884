"""Heat maps of attacks against defences."""

import json
from collections.abc import Sequence
from typing import Any

from equipoise.reporting.attack_table import CONTROL, USUAL, attack_rows
from equipoise.reporting.html.chart import Chart, chart, plain
from equipoise.storage.run_index import FinishedRun, higher_is_better

_ROW, _BAR, _FRAME = 34, 24, 190
"""Height in pixels of a row of a map, of a bar, and of all around them."""


def grids(runs: Sequence[FinishedRun]) -> list[Chart]:
    """Return one map per problem, algorithm and kind of model, if runs differ in both attack and defence."""
    problems: dict[str, list[FinishedRun]] = {}
    for run in runs:
        problems.setdefault(_problem(run), []).append(run)
    charts: list[Chart] = []
    for some in problems.values():
        places: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
        for row in attack_rows(some):
            places.setdefault((row["algorithm"], row["model"], row["malicious"]), []).append(row)
        for (algorithm, kind, fraction), rows in places.items():
            attacks = _ordered([row["attack"] for row in rows], CONTROL)
            defences = _ordered([row["defence"] for row in rows], USUAL)
            if len(attacks) < 2 or len(defences) < 2:
                continue
            title = f"Attacks against defences: {algorithm}, {kind} model, {fraction:.0%} malicious"
            if len(problems) > 1:
                title += f", {some[0].summary['dataset']}"
            charts.append(
                _grid(f"grid-{len(charts)}", title, attacks, defences, rows, higher_is_better(some[0].summary))
            )
    return charts


def successes(runs: Sequence[FinishedRun]) -> list[Chart]:
    """Return the chart of how often attacks get the label that they want, beside their floors."""
    rows = [row for row in attack_rows(runs) if row["success"] is not None]
    if not rows:
        return []
    names = [
        plain(f"{row['attack']}, {row['defence']}: {row['algorithm']} ({row['model']}), {row['malicious']:.0%}")
        for row in rows
    ]
    spread = [None if row["success_std"] is None else 100 * row["success_std"] for row in rows]
    bars = {
        "type": "bar",
        "orientation": "h",
        "name": "success",
        "y": names,
        "x": [100 * row["success"] for row in rows],
        "error_x": {"type": "data", "array": spread, "visible": any(each is not None for each in spread)},
        "hovertemplate": "%{y}: %{x:.1f}%<extra></extra>",
    }
    floors = {
        "type": "scatter",
        "mode": "markers",
        "name": "floor (nobody attacks)",
        "y": [name for name, row in zip(names, rows, strict=True) if row["floor"] is not None],
        "x": [100 * row["floor"] for row in rows if row["floor"] is not None],
        "marker": {"symbol": "line-ns-open", "size": 16, "color": "#d55e00"},
        "hovertemplate": "%{y}, floor: %{x:.1f}%<extra></extra>",
    }
    note = (
        "Benign test samples that models give the attackers' label; the mark is the same in the run without an attack."
    )
    more: dict[str, Any] = {
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True, "title": {"text": ""}},
        "showlegend": True,
    }
    made = chart("attack-success", "Success of attacks", note, [bars, floors], "% of the samples", "", **more)
    return [{**made, "height": _FRAME + _BAR * len(rows)}]


def _problem(run: FinishedRun) -> str:
    apart = ("attack.", "reducer.", "engine.")
    kept = {k: v for k, v in run.config.items() if not k.startswith(apart) and k != "seed"}
    return json.dumps([kept, run.summary["dataset"], run.summary["metric"]], sort_keys=True)


def _ordered(names: Sequence[str], first: str) -> list[str]:
    """Return each name once, the usual one first."""
    return sorted(dict.fromkeys(names), key=lambda name: (name != first, name))


def _grid(
    id: str, title: str, attacks: list[str], defences: list[str], rows: Sequence[dict[str, Any]], higher: bool
) -> Chart:
    cells = {(row["attack"], row["defence"]): row for row in rows}
    metric = rows[0]["metric"]
    scale, digits = (100.0, 1) if metric == "accuracy" else (1.0, 3)
    z: list[list[float | None]] = []
    text: list[list[str]] = []
    hover: list[list[str]] = []
    for attack in attacks:
        line = [cells.get((attack, defence)) for defence in defences]
        z.append([None if row is None or row["score"] is None else scale * row["score"] for row in line])
        text.append(["" if row is None else _short(row, scale, digits) for row in line])
        hover.append(["not run" if row is None else _long(row, scale, digits) for row in line])
    trace = {
        "type": "heatmap",
        "colorscale": "Viridis",
        "reversescale": not higher,
        "z": z,
        "x": [plain(name) for name in defences],
        "y": [plain(name) for name in attacks],
        "text": text,
        "texttemplate": "%{text}",
        "customdata": hover,
        "hovertemplate": "%{y}, %{x}: %{customdata}<extra></extra>",
        "colorbar": {"title": {"text": metric if metric != "accuracy" else "%"}},
    }
    note = (
        "Scores of the benign clients, means over seeds; an arrow and the second number: part of the benign test "
        "samples that get the attackers' label. Touch a cell for the control, the damage and the floor."
    )
    more: dict[str, Any] = {
        "yaxis": {"autorange": "reversed", "type": "category", "title": {"text": "attack"}, "automargin": True},
        "xaxis": {"type": "category", "title": {"text": "defence"}},
    }
    made = chart(id, plain(title), note, [trace], "defence", "attack", **more)
    return {**made, "height": _FRAME + _ROW * len(attacks)}


def _short(row: dict[str, Any], scale: float, digits: int) -> str:
    score = "–" if row["score"] is None else f"{scale * row['score']:.{digits}f}"
    return score if row["success"] is None else f"{score} → {100 * row['success']:.0f}%"


def _long(row: dict[str, Any], scale: float, digits: int) -> str:
    parts = [_short(row, scale, digits)]
    parts += [f"control {scale * row['control']:.{digits}f}"] if row["control"] is not None else []
    parts += [f"damage {scale * row['damage']:.{digits}f}"] if row["damage"] is not None else []
    parts += [f"floor {100 * row['floor']:.0f}%"] if row["floor"] is not None else []
    return ", ".join([*parts, f"{row['seeds']} seed{'s' if row['seeds'] > 1 else ''}"])
