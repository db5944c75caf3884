"""A report of runs: one HTML file that needs nothing else, with charts to look into and tables to sort."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import jinja2
import tomli_w

from equipoise import files, report
from equipoise.board import KINDS
from equipoise.page import charts
from equipoise.page.charts import DASHES, Chart, Method
from equipoise.page.clients import Clients
from equipoise.report import Run
from equipoise.reproduce import PAPER
from equipoise.runfolder import read_toml

_SCENE = ("data.", "attack.", "privacy.")
"""Settings that make another problem of it; methods are compared within one."""


@dataclass(frozen=True)
class Scene:
    """One problem, and the methods that were run on it."""

    name: str
    methods: list[Method]


def scenes(runs: list[Run]) -> list[Scene]:
    groups = sorted(report.grouped(runs), key=lambda group: _disturbed(group[0]))
    keys = [
        json.dumps({k: v for k, v in group[0].config.items() if k.startswith(_SCENE)}, sort_keys=True)
        + group[0].summary["dataset"]
        for group in groups
    ]
    places: dict[str, list[list[Run]]] = {}
    for key, group in zip(keys, groups, strict=True):
        places.setdefault(key, []).append(group)
    firsts = [some[0][0] for some in places.values()]
    found: list[Scene] = []
    numbers: dict[str, int] = {}  # a method has one colour and one switch, wherever it stands
    for first, settings, some in zip(firsts, report.told_apart(firsts, _SCENE), places.values(), strict=True):
        rows = report.compare([run for group in some for run in group])
        methods = []
        for own, group in zip(rows, some, strict=True):
            name = f"{own['algorithm']} {own['settings']}".strip()
            methods.append(Method(numbers.setdefault(name, len(numbers)), name, group))
        found.append(Scene(f"{first.summary['dataset']} {settings}".strip(), methods))
    return found


def _disturbed(run: Run) -> int:
    """Problems with attacks or noise stand after those without."""
    return int(any(key.startswith(("attack.", "privacy.")) for key in run.config))


def drawn(scene: Scene, clients: Clients) -> list[Chart]:
    """The charts of one problem. Methods with another metric than the first would need axes of their own."""
    methods = [method for method in scene.methods if method.metric == scene.methods[0].metric]
    every: list[Chart | None] = [
        charts.scores(methods),
        charts.losses(methods),
        charts.traffic(methods),
        charts.by_client(methods, clients),
        charts.distribution(methods, clients),
        charts.fairness(methods),
        charts.federation(run for method in methods for run in method.runs),
        *charts.learned(methods),
        *charts.similarity(methods),
    ]
    return [chart for chart in every if chart is not None]


def _attacks(found: Sequence[Scene]) -> list[Chart]:
    """Over problems that differ in the attack alone, of the first data."""
    methods = [method for scene in found for method in scene.methods]
    same = [m for m in methods if _data(m) == _data(methods[0]) and m.metric == methods[0].metric]
    return charts.attacks(same)


def _data(method: Method) -> str:
    config = method.runs[0].config
    return json.dumps({k: v for k, v in config.items() if k.startswith("data.")}, sort_keys=True)


def table(found: Sequence[Scene]) -> tuple[list[str], list[dict[str, Any]]]:
    """A row a method: figures as they are, and as people read them."""
    rows: list[dict[str, Any]] = []
    kinds = [k for k in KINDS if any(k in method.kinds for scene in found for method in scene.methods)]
    for scene in found:
        for method in scene.methods:
            row = report.compare(method.runs)[0]
            cells: dict[str, Any] = {"seeds": row["seeds"]}
            for kind in kinds:
                cells[kind] = row[kind]
            best = "personal" if row["personal"] is not None else "global"
            cells |= {"worst tenth": row[f"{best}_worst"], "spread": row[f"{best}_spread"]}
            cells |= {"MB sent": (row["bytes_up"] + row["bytes_down"]) / 1e6, "seconds": row["seconds"]}
            cells |= {f"ε {k.removeprefix('epsilon_')}": row[k] for k in ("epsilon_release", "epsilon_run")}
            shown = {name: _shown(name, value, row) for name, value in cells.items()}
            spread = {kind: row[f"{kind}_std"] for kind in kinds}
            rows.append({"scene": scene.name, "method": method, "cells": cells, "shown": shown, "std": spread})
    names = [name for name in rows[0]["cells"] if any(row["cells"][name] is not None for row in rows)]
    return names, rows


def _shown(name: str, value: float | None, row: dict[str, Any]) -> str:
    if value is None:
        return "–"
    if name in ("MB sent", "seconds"):
        return f"{value:,.1f}"
    if name == "seeds" or name.startswith("ε"):
        return f"{value:.3g}"
    if row["metric"] != "accuracy":
        return f"{value:.4f}"
    deviation = row.get(f"{name}_std")
    return f"{100 * value:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}")


def published(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """What `equipoise reproduce` set beside the papers' figures, of runs in these folders or beside them."""
    places = dict.fromkeys(place for folder in folders for place in (folder, *folder.resolve().parents[:2]))
    places |= dict.fromkeys(path.parent for folder in folders for path in sorted(folder.glob(f"*/{PAPER}")))
    seen: dict[Path, None] = {}
    for place in places:
        if (path := place / PAPER).is_file():
            seen[path.resolve()] = None
    found = []
    for path in seen:
        for name, tables in json.loads(path.read_text()).items():
            found += [{"name": name, **each} for each in tables.values() if each["rows"]]
    return found


def write(runs: list[Run], out: Path, title: str, folders: Sequence[Path] = (), left: int = 0) -> None:
    """The page of these runs; `left` others are not finished."""
    from plotly.offline import get_plotlyjs

    found, clients = scenes(runs), Clients()
    figures = {
        "scenes": [{"name": scene.name, "charts": drawn(scene, clients)} for scene in found],
        "attacks": _attacks(found),
    }
    names, rows = table(found)
    methods = [method for scene in found for method in scene.methods]
    text = _template().render(
        title=title,
        scenes=found,
        kinds={kind: DASHES[kind] for kind in KINDS if any(kind in method.kinds for method in methods)},
        names=names,
        rows=rows,
        accuracy=all(method.metric == "accuracy" for method in methods),
        papers=published(folders),
        configs=[(method, tomli_w.dumps(read_toml(method.runs[0].path / "run.toml"))) for method in methods],
        runs=len(runs),
        left=left,
        version=version("equipoise"),
        figures=embedded(figures),
        plotly=get_plotlyjs(),
        css=_read("page.css"),
        js=_read("page.js"),
    )
    files.write_text(out, text)


def embedded(value: Any) -> str:
    """JSON that stands in a script element: nothing in it can end that element, and NaN is null."""
    text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value


def _read(name: str) -> str:
    return (resources(__package__) / name).read_text(encoding="utf-8")


def _template() -> jinja2.Template:
    strict: dict[str, Any] = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True, **strict).from_string(_read("page.html"))
