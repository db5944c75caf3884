"""The report of runs: one self-contained HTML file with interactive charts and sortable tables."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import jinja2
import tomli_w

from equipoise.reporting import comparison
from equipoise.reporting.comparison import SCENE
from equipoise.reporting.html import attack_maps, curves, forecasts, maps, per_class
from equipoise.reporting.html.chart import DASHES, Chart, Method
from equipoise.reporting.html.clients import Clients, by_client, distribution, fairness
from equipoise.storage import atomic_files, run_index
from equipoise.storage.model_kinds import KINDS
from equipoise.storage.run_folder import read_toml
from equipoise.storage.run_index import PAPER, FinishedRun

_SCORING = ("evaluate_every", "metrics", "targets")
_USUAL = " reducer=weighted-mean"
"""The default reducer, which is not shown; other reducers are."""


@dataclass(frozen=True)
class Problem:
    """One problem, and the methods that were run on it."""

    name: str
    methods: list[Method]


def scenes(runs: list[FinishedRun]) -> list[Problem]:
    """Group runs by problem, and on each problem by method."""
    groups = sorted(run_index.grouped(runs), key=lambda group: _disturbed(group[0]))
    problems = [_problem(group[0]) for group in groups]
    # How often models are scored counts only if nothing else distinguishes two methods on one problem.
    apart: tuple[str, ...] = ("seed", *_SCORING)
    if len({*zip(problems, (_kind(group[0], apart) for group in groups), strict=True)}) < len(groups):
        apart = ("seed",)
    methods = _methods(groups, [_kind(group[0], apart) for group in groups], apart)
    places: dict[str, list[Method]] = {}
    for problem, method in zip(problems, methods, strict=True):
        places.setdefault(problem, []).append(method)
    firsts = [some[0].runs[0] for some in places.values()]
    names = comparison.told_apart(firsts, SCENE)
    return [
        Problem(f"{first.summary['dataset']} {settings}".strip(), some)
        for first, settings, some in zip(firsts, names, places.values(), strict=True)
    ]


def _problem(run: FinishedRun) -> str:
    setting = {k: v for k, v in run.config.items() if k.startswith(SCENE)}
    return json.dumps([setting, run.summary["dataset"]], sort_keys=True)


def _kind(run: FinishedRun, apart: Sequence[str]) -> str:
    """Return a run's settings except those of its problem and these, as JSON."""
    own = {k: v for k, v in run.config.items() if not k.startswith(SCENE) and k not in apart}
    return json.dumps([own, run.summary["metric"]], sort_keys=True)


def _methods(groups: Sequence[list[FinishedRun]], kinds: Sequence[str], apart: Sequence[str]) -> list[Method]:
    """Return the methods; one that occurs on several problems has the same number (and so colour) and name on all."""
    firsts: dict[str, FinishedRun] = {}
    for (first, *_), kind in zip(groups, kinds, strict=True):
        config = {k: v for k, v in first.config.items() if not k.startswith(SCENE) and k not in apart}
        firsts.setdefault(kind, replace(first, config=config, summary={**first.summary, "dataset": ""}))
    rows = comparison.compare(list(firsts.values()))
    labels = [f"{row['algorithm']} {row['settings']}".replace(_USUAL, "").strip() for row in rows]
    names = dict(zip(firsts, labels, strict=True))
    numbers = {kind: number for number, kind in enumerate(firsts)}
    return [Method(numbers[kind], names[kind], group) for kind, group in zip(kinds, groups, strict=True)]


def _disturbed(run: FinishedRun) -> int:
    """Return a sort key that puts problems with attacks or noise last."""
    return int(any(key.startswith(("attack.", "privacy.")) for key in run.config))


def drawn(scene: Problem, clients: Clients) -> list[Chart]:
    """Return the charts of one problem, separate ones for each metric."""
    charts: list[Chart] = []
    metrics = list(dict.fromkeys(method.metric for method in scene.methods))
    for metric in metrics:
        methods = [method for method in scene.methods if method.metric == metric]
        every = [
            curves.scores(methods),
            curves.pooled(methods),
            *curves.others(methods),
            curves.losses(methods),
            forecasts.by_step(methods),
            *curves.diagnostics(methods),
            curves.traffic(methods),
            by_client(methods, clients),
            distribution(methods, clients),
            fairness(methods),
        ]
        made = [chart for chart in every if chart is not None and chart["data"]]
        if len(metrics) > 1:
            made = [{**c, "id": f"{c['id']}-{metric}", "title": f"{c['title']} ({metric})"} for c in made]
        charts += made
    federation = maps.federation(run for method in scene.methods for run in method.runs)
    charts += [] if federation is None else [federation]
    by_class = [per_class.recalls(scene.methods), *per_class.confusion(scene.methods)]
    charts += [chart for chart in by_class if chart is not None]
    return [*charts, *maps.learned(scene.methods), *maps.similarity(scene.methods)]


def table(found: Sequence[Problem]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of the columns, and one row per method with its figures as numbers and as text."""
    rows: list[dict[str, Any]] = []
    kinds = [k for k in KINDS if any(k in method.kinds for scene in found for method in scene.methods)]
    others = comparison.other_metrics([run for scene in found for method in scene.methods for run in method.runs])
    for scene in found:
        for method in scene.methods:
            row = comparison.compare(method.runs)[0]
            cells: dict[str, Any] = {"seeds": row["seeds"]}
            for kind in kinds:
                cells |= {kind: row[kind], f"{kind} pooled": row[f"{kind}_pooled"]}
            best = "personal" if row["personal"] is not None else "global"
            cells |= {"worst tenth": row[f"{best}_worst"], "spread": row[f"{best}_spread"]}
            cells |= {"MB sent": (row["bytes_up"] + row["bytes_down"]) / 1e6, "seconds": row["seconds"]}
            cells |= {"unseen": row["unseen"]}
            cells |= {f"ε {k.removeprefix('epsilon_')}": row[k] for k in ("epsilon_release", "epsilon_run")}
            for kind, name in ((kind, name) for name in others for kind in kinds):
                cells[f"{kind} {name}"] = row.get(f"{kind}_{name}")
                cells[f"{kind} {name} pooled"] = row.get(f"{kind}_{name}_pooled")
            shown = {name: _shown(name, value, row, others) for name, value in cells.items()}
            rows.append({"scene": scene.name, "method": method, "cells": cells, "shown": shown})
    names = [name for name in rows[0]["cells"] if any(row["cells"][name] is not None for row in rows)]
    return names, rows


def _shown(name: str, value: float | None, row: dict[str, Any], others: Sequence[str]) -> str:
    if value is None:
        return "–"
    if name in ("MB sent", "seconds"):
        return f"{value:,.1f}"
    if name == "seeds" or name.startswith("ε"):
        return f"{value:.3g}"
    percent = row["metric"] == "accuracy" and not any(name.endswith((f" {o}", f" {o} pooled")) for o in others)
    scale, digits = (100, 2) if percent else (1, 4)
    deviation = row.get(f"{name.replace(' ', '_')}_std")
    return f"{scale * value:.{digits}f}" + ("" if deviation is None else f" ± {scale * deviation:.{digits}f}")


def published(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the comparisons with papers that `equipoise reproduce` wrote into these folders or next to them."""
    places = dict.fromkeys(place for folder in folders for place in (folder, *folder.resolve().parents[:2]))
    places |= dict.fromkeys(path.parent for folder in folders for path in sorted(folder.glob(f"*/{PAPER}")))
    seen: dict[Path, None] = {}
    for place in places:
        if (path := place / PAPER).is_file():
            seen[path.resolve()] = None
    found = []
    for path in seen:
        for name, kept in atomic_files.read_json(path).items():
            found += [{"name": name, "notes": kept["notes"], **each} for each in kept["tables"] if each["rows"]]
    return found


def write(
    runs: list[FinishedRun], out: Path, title: str, folders: Sequence[Path] = (), skipped: Sequence[str] = ()
) -> None:
    """Write the report.

    Args:
        runs: the finished runs.
        out: the HTML file.
        title: title of the page.
        folders: where to look for comparisons with papers.
        skipped: sentences about runs that were skipped.
    """
    from plotly.offline import get_plotlyjs

    found, clients = scenes(runs), Clients()
    figures = {
        "scenes": [{"name": scene.name, "charts": drawn(scene, clients)} for scene in found],
        "attacks": [
            *attack_maps.grids(runs),
            *attack_maps.successes(runs),
            *curves.attacks([method for scene in found for method in scene.methods]),
        ],
    }
    names, rows = table(found)
    methods = [method for scene in found for method in scene.methods]
    text = _template().render(
        title=title,
        scenes=found,
        kinds={kind: DASHES[kind] for kind in KINDS if any(kind in method.kinds for method in methods)},
        names=names,
        rows=rows,
        accuracy=any(method.metric == "accuracy" for method in methods),
        papers=published(folders),
        configs=[(method, tomli_w.dumps(read_toml(method.runs[0].path / "run.toml"))) for method in methods],
        mixed=len({method.metric for method in methods}) > 1,
        named=all("data.name" in method.config for method in methods),
        runs=len(runs),
        distinct=len({method.number for method in methods}),
        skipped=skipped,
        version=version("equipoise"),
        figures=embedded(figures),
        plotly=get_plotlyjs(),
        css=_read("page.css"),
        js=_read("page.js"),
    )
    atomic_files.write_text(out, text)


def embedded(value: Any) -> str:
    """Return JSON for a script element: nothing in it can close the element, and NaN becomes null."""
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
