"""The charts of a report, as plotly.js takes them: traces and a layout, in plain dictionaries.

Every trace says in `meta` which method and which kind of model it is of, so that the page can switch them on and off.
"""

import html
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from equipoise.board import KINDS
from equipoise.page.clients import Clients
from equipoise.report import Run
from equipoise.runfolder import FEDERATION, SHOWN

Chart = dict[str, Any]
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56a0d3"),
    *("#8c564b", "#7f7f7f", "#6a3d9a", "#a6761d", "#1b7837", "#e7298a"),
)
"""Told apart by most eyes, and dark enough on white as light enough on black."""
DASHES = {"personal": "solid", "consensus": "longdashdot", "global": "dash", "hybrid": "dot", "oracle": "dashdot"}
SYMBOLS = {"personal": "circle", "consensus": "triangle-up", "global": "square", "hybrid": "star", "oracle": "x"}
_MOST = 1500
"""Clients that are drawn as points; of more, as many spread over the list."""


@dataclass(frozen=True)
class Method:
    """Runs that differ only in the seed."""

    number: int
    name: str
    runs: list[Run]

    @property
    def colour(self) -> str:
        return COLOURS[self.number % len(COLOURS)]

    @property
    def metric(self) -> str:
        return str(self.runs[0].summary["metric"])

    @property
    def scale(self) -> float:
        return 100.0 if self.metric == "accuracy" else 1.0

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in KINDS if self.runs[0].summary.get(kind)]


def plain(text: str) -> str:
    """plotly.js reads a few tags in texts; a name is a name."""
    return html.escape(text, quote=False)


def unit(methods: Sequence[Method]) -> str:
    metric = methods[0].metric
    return "test accuracy (%)" if metric == "accuracy" else f"test {metric}"


def _trace(method: Method, kind: str, **more: Any) -> dict[str, Any]:
    return {"name": plain(f"{method.name} ({kind})"), "meta": {"method": method.number, "kind": kind}, **more}


def _chart(id: str, title: str, note: str, data: list[dict[str, Any]], x: str, y: str, **layout: Any) -> Chart:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return {"id": id, "title": title, "note": note, "data": data, "layout": {**axes, **layout}}


Point = tuple[float, float, float]
"""Where, how high, and the deviation over seeds."""


def _curve(method: Method, kind: str, field: str, at: Callable[[dict[str, Any]], float], scale: float) -> list[Point]:
    """Means at each evaluation that all seeds have."""
    found: dict[int, list[tuple[float, float]]] = {}
    for run in method.runs:
        for line in run.metrics:
            if (value := line.get(kind, {}).get(field)) is not None:
                found.setdefault(line["round"], []).append((at(line), scale * value))
    points = []
    for _, pairs in sorted(found.items()):
        if len(pairs) == len(method.runs):
            values = [value for _, value in pairs]
            points.append((mean(x for x, _ in pairs), mean(values), stdev(values) if len(values) > 1 else 0.0))
    return points


def _lines(methods: Sequence[Method], field: str | None, at: Callable[[dict[str, Any]], float]) -> list[dict[str, Any]]:
    traces = []
    for method in methods:
        for kind in method.kinds:
            scale = method.scale if field is None else 1.0
            points = _curve(method, kind, field or method.metric, at, scale)
            if not points:
                continue
            x, y, deviation = (list(column) for column in zip(*points, strict=True))
            if len(method.runs) > 1 and len(points) > 1:
                band = [a + d for a, d in zip(y, deviation, strict=True)]
                below = [a - d for a, d in zip(y, deviation, strict=True)]
                traces.append(
                    _trace(
                        method,
                        kind,
                        x=[*x, *x[::-1]],
                        y=[*band, *below[::-1]],
                        fill="toself",
                        fillcolor=f"{method.colour}26",
                        line={"width": 0},
                        hoverinfo="skip",
                        mode="lines",
                        type="scatter",
                    )
                )
            traces.append(
                _trace(
                    method,
                    kind,
                    x=x,
                    y=y,
                    customdata=deviation,
                    mode="lines+markers" if len(points) < 20 else "lines",
                    line={"color": method.colour, "dash": DASHES[kind], "width": 2},
                    marker={"symbol": SYMBOLS[kind], "size": 6},
                    hovertemplate="%{x}: %{y:.4~f} ± %{customdata:.2~g}",
                    type="scatter",
                )
            )
    return traces


def scores(methods: Sequence[Method]) -> Chart:
    data = _lines(methods, None, lambda line: line["round"])
    note = "Mean over clients; the band is a standard deviation over seeds, where there are several."
    return _chart("scores", "Score against rounds", note, data, "round", unit(methods))


def losses(methods: Sequence[Method]) -> Chart:
    data = _lines(methods, "loss", lambda line: line["round"])
    return _chart("losses", "Loss against rounds", "On test samples, mean over clients.", data, "round", "test loss")


def traffic(methods: Sequence[Method]) -> Chart | None:
    data = _lines(methods, None, lambda line: (line["bytes_up"] + line["bytes_down"]) / 1e6)
    if not any(max(trace["x"]) > 0 for trace in data):
        return None
    note = "All that server and clients have sent each other by then, in both directions."
    return _chart("bytes", "Score against bytes", note, data, "sent (MB)", unit(methods))


def by_client(methods: Sequence[Method], clients: Clients) -> Chart | None:
    """Each client's personal model against the global one."""
    data: list[dict[str, Any]] = []
    low, high = np.inf, -np.inf
    for method in methods:
        table = clients.of(method.runs[0])
        if table is None or not {"personal", "global"} <= set(method.kinds):
            continue
        for kind in (kind for kind in method.kinds if kind != "global"):
            x, y = method.scale * table.scores("global"), method.scale * table.scores(kind)
            shown = _spread_over(np.flatnonzero(np.isfinite(x) & np.isfinite(y)))
            low = min(low, *x[shown], *y[shown]) if len(shown) else low
            high = max(high, *x[shown], *y[shown]) if len(shown) else high
            data.append(
                _trace(
                    method,
                    kind,
                    x=x[shown].tolist(),
                    y=y[shown].tolist(),
                    text=[plain(table.names[i]) for i in shown],
                    mode="markers",
                    marker={"color": method.colour, "symbol": SYMBOLS[kind], "size": 7, "opacity": 0.7},
                    hovertemplate="%{text}: global %{x:.4~f}, own %{y:.4~f}",
                    type="scatter",
                )
            )
    if not data or not np.isfinite(low):
        return None
    line = {"x": [low, high], "y": [low, high], "mode": "lines", "hoverinfo": "skip", "type": "scatter"}
    data.append({**line, "name": "equal", "line": {"color": "#888888", "width": 1}})
    better = "Above the line" if methods[0].metric == "accuracy" else "Below the line"
    note = f"A point a client, first seed. {better}, what it has of its own serves it better than the global model."
    return _chart("clients", "Personal against global, client by client", note, data, "global", "personal or hybrid")


def _spread_over(indices: np.ndarray) -> np.ndarray:
    if len(indices) <= _MOST:
        return indices
    return np.asarray(indices[np.linspace(0, len(indices) - 1, _MOST).round().astype(int)])


def distribution(methods: Sequence[Method], clients: Clients) -> Chart | None:
    data: list[dict[str, Any]] = []
    for method in methods:
        tables = [table for run in method.runs if (table := clients.of(run)) is not None]
        for kind in method.kinds if tables else ():
            values = np.concatenate([method.scale * table.scores(kind) for table in tables])
            values = values[np.isfinite(values)]
            if not len(values):
                continue
            place = plain(f"{method.name}, {kind}")
            data.append(
                _trace(
                    method,
                    kind,
                    y=values[_spread_over(np.arange(len(values)))].tolist(),
                    x0=place,
                    boxpoints=False if len(values) > 400 else "all",
                    jitter=0.4,
                    pointpos=0,
                    marker={"color": method.colour, "size": 4, "opacity": 0.5},
                    line={"color": method.colour},
                    boxmean=True,
                    type="box",
                )
            )
            worst = [run.summary[kind].get("worst_decile") for run in method.runs]
            if all(value is not None for value in worst):
                data.append(
                    _trace(
                        method,
                        kind,
                        x=[place],
                        y=[method.scale * mean(worst)],
                        mode="markers",
                        marker={"color": method.colour, "symbol": "diamond-open", "size": 12, "line": {"width": 2}},
                        hovertemplate="worst tenth %{y:.4~f}",
                        type="scatter",
                    )
                )
    if not data:
        return None
    note = "Clients of all seeds. Box: quartiles, median and (dashed) mean; open diamond: mean of the worst tenth."
    return _chart("distribution", "How evenly clients are served", note, data, "", unit(methods))


def fairness(methods: Sequence[Method]) -> Chart | None:
    data = []
    for method in methods:
        for kind in method.kinds:
            figures = [[run.summary[kind].get(f) for f in (method.metric, "loss_variance")] for run in method.runs]
            good = [(method.scale * a, b) for a, b in figures if a is not None and b is not None]
            if good:
                marker = {"color": method.colour, "symbol": SYMBOLS[kind], "size": 11}
                x, y = (mean(column) for column in zip(*good, strict=True))
                more = {"hovertemplate": "%{x:.4~f}, variance %{y:.3~g}", "type": "scatter", "mode": "markers"}
                data.append(_trace(method, kind, x=[x], y=[y], marker=marker, **more))
    if len(data) < 2:
        return None
    better = "right" if methods[0].metric == "accuracy" else "left"
    note = f"Lower {better} is better: good scores whose losses differ little between clients."
    return _chart("fairness", "Score against fairness", note, data, unit(methods), "variance of losses over clients")


def attacks(methods: Sequence[Method]) -> list[Chart]:
    """A chart an attack: benign clients' scores against the part of malicious ones."""
    under: dict[str, list[Method]] = {}
    for method in methods:
        if _fraction(method):
            under.setdefault(str(method.runs[0].config["attack.name"]), []).append(method)
    charts = []
    for attack, some in under.items():
        mine = [*(m for m in methods if not _fraction(m)), *some]
        lines: dict[tuple[str, str], list[Method]] = {}
        for method in mine:
            for kind in method.kinds:
                lines.setdefault((_defended(method), kind), []).append(method)
        data = []
        names = sorted({name for name, _ in lines})
        for (name, kind), group in lines.items():
            found = [(m, [s for r in m.runs if (s := r.summary[kind][m.metric]) is not None]) for m in group]
            points = sorted((_fraction(m), m.scale * mean(scores)) for m, scores in found if scores)
            if not points:
                continue
            x, y = (list(column) for column in zip(*points, strict=True))
            data.append(
                {
                    "name": plain(f"{name} ({kind})"),
                    "meta": {"kind": kind, "algorithm": group[0].runs[0].config["algorithm.name"]},
                    "x": x,
                    "y": y,
                    "mode": "lines+markers",
                    "line": {"color": COLOURS[names.index(name) % len(COLOURS)], "dash": DASHES[kind]},
                    "marker": {"symbol": SYMBOLS[kind], "size": 8},
                    "hovertemplate": "%{x:.0%}: %{y:.4~f}",
                    "type": "scatter",
                }
            )
        title = f"Under attack: {attack}"
        note = "Benign clients alone; a line a method and kind of model."
        layout = {"showlegend": True}
        charts.append(
            _chart(f"attack-{attack}", title, note, data, "part of malicious clients", unit(methods), **layout)
        )
    return charts


def _fraction(method: Method) -> float:
    summary = method.runs[0].summary
    return len(summary.get("malicious", ())) / int(summary["clients"])


def _defended(method: Method) -> str:
    config = method.runs[0].config
    reducer = config.get("reducer.name", "weighted-mean")
    return str(config["algorithm.name"]) + ("" if reducer in ("mean", "weighted-mean") else f" with {reducer}")


def federation(runs: Iterable[Run]) -> Chart | None:
    """Who has how much of what, of the first run that says so."""
    path = next((p for run in runs if (p := run.path / FEDERATION).exists()), None)
    if path is None:
        return None
    found = json.loads(path.read_text())
    counts = found.get("labels")
    if not counts:
        return None
    shares = [[n / max(1, sum(row)) for n in row] for row in counts]
    names = [plain(name) for name in found["names"]]
    trace = {
        "z": shares,
        "y": names,
        "text": [[str(n) for n in row] for row in counts],
        "hovertemplate": "%{y}, label %{x}: %{text} samples<extra></extra>",
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": "share"}},
        "type": "heatmap",
    }
    note = f"{found['clients']} clients" + ("" if found["clients"] == len(names) else f", {len(names)} of them shown")
    more = {"yaxis": {"title": {"text": "client"}, "autorange": "reversed", "type": "category"}}
    title = "The federation: who has which labels"
    return _chart("federation", title, f"{note}. First seed.", [trace], "label", "client", **more)


def learned(methods: Sequence[Method]) -> list[Chart]:
    """How strongly each client's parameters are tied to the others', as Learn2pFed has learned."""
    from safetensors.numpy import load_file

    charts = []
    for method in methods:
        path = method.runs[0].path / SHOWN
        if not path.exists():
            continue
        lam = load_file(path).get("lam")
        if lam is None:
            continue
        lam = lam.reshape(len(lam), -1)[:200, :200]
        trace = {
            "z": np.log10(np.maximum(lam, 1e-12)).tolist(),
            "text": [[f"{v:.3g}" for v in row] for row in lam.tolist()],
            "hovertemplate": "client %{y}, parameter %{x}: Λ = %{text}<extra></extra>",
            "colorscale": "Viridis",
            "colorbar": {"title": {"text": "log₁₀ Λ"}},
            "type": "heatmap",
            "meta": {"method": method.number},
        }
        note = "Large: tied to all others'; small: the client's own. First seed, at most 200 clients and parameters."
        title = f"What {method.name} shares"
        charts.append(_chart(f"learned-{method.number}", title, note, [trace], "parameter", "client"))
    return charts


def similarity(methods: Sequence[Method]) -> list[Chart]:
    """What `equipoise cka` wrote into the folders of these runs."""
    charts = []
    for method in methods:
        path: Path = method.runs[0].path / "cka.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        trace = {
            "z": found["cka"],
            "x": [plain(pair) for pair in found["pairs"]],
            "y": [plain(layer) for layer in found["layers"]],
            "zmin": 0,
            "zmax": 1,
            "hovertemplate": "%{y}, %{x}: %{z:.3f}<extra></extra>",
            "colorscale": "Viridis",
            "colorbar": {"title": {"text": "CKA"}},
            "type": "heatmap",
            "meta": {"method": method.number},
        }
        note = f"Between {found['between']}, after round {found['rounds']}, on {found['samples']} test samples."
        more = {"yaxis": {"autorange": "reversed", "type": "category"}, "xaxis": {"type": "category"}}
        title = f"How alike layers are: {method.name}"
        charts.append(_chart(f"cka-{method.number}", title, note, [trace], "client", "layer", **more))
    return charts
