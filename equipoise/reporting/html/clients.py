"""Charts of individual clients, from clients.csv: personal against global models, and fairness between clients."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import numpy as np

from equipoise.reporting.html.chart import SYMBOLS, Chart, Method, Trace, chart, plain, short, trace, unit
from equipoise.storage.run_index import FinishedRun

_MOST = 1500
"""Largest number of clients that are drawn as points; of more clients, an even selection."""
_ROW = 26
"""Height of a box in pixels."""


@dataclass(frozen=True)
class Table:
    """The columns of a clients.csv that hold scores."""

    names: list[str]
    columns: dict[str, np.ndarray]

    def scores(self, kind: str) -> np.ndarray:
        """Return the scores on test samples, NaN for clients without."""
        found = self.columns.get(f"{kind}_test_metric")
        return np.full(len(self.names), np.nan) if found is None else found


@dataclass(frozen=True)
class Clients:
    """The tables of runs, each of which is read once."""

    tables: dict[Path, Table | None] = field(default_factory=dict)

    def of(self, run: FinishedRun) -> Table | None:
        """Return the table of a run, or None if it has none."""
        if run.path not in self.tables:
            self.tables[run.path] = _read(run.path / "clients.csv")
        return self.tables[run.path]


def _read(path: Path) -> Table | None:
    if not path.exists():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # Unseen clients are scored differently, and malicious ones do not count.
    rows = [row for row in rows if "true" not in (row.get("unseen"), row.get("malicious"))]
    if not rows:
        return None
    names = [name for name in rows[0] if name.endswith("_metric")]
    columns = {name: np.array([float(row[name]) if row[name] else np.nan for row in rows]) for name in names}
    return Table([row["client"] for row in rows], columns)


def by_client(methods: Sequence[Method], clients: Clients) -> Chart | None:
    """Return the chart of each client's personal model against the global one."""
    data: list[Trace] = []
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
                trace(
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
    better = "Above the line" if methods[0].higher_is_better else "Below the line"
    note = f"One point per client, first seed. {better}, the client's own model scores better than the global model."
    return chart("clients", "Personal against global, client by client", note, data, "global", "personal or hybrid")


def _spread_over(indices: np.ndarray) -> np.ndarray:
    if len(indices) <= _MOST:
        return indices
    return np.asarray(indices[np.linspace(0, len(indices) - 1, _MOST).round().astype(int)])


def distribution(methods: Sequence[Method], clients: Clients) -> Chart | None:
    """Return the box plot of scores over clients, with horizontal boxes, because names are long."""
    data: list[Trace] = []
    places: list[str] = []
    for method in methods:
        tables = [table for run in method.runs if (table := clients.of(run)) is not None]
        for kind in method.kinds if tables else ():
            values = np.concatenate([method.scale * table.scores(kind) for table in tables])
            values = values[np.isfinite(values)]
            if not len(values):
                continue
            places.append(f"{kind}: {method.name}")
            place = plain(places[-1])
            data.append(
                trace(
                    method,
                    kind,
                    x=values[_spread_over(np.arange(len(values)))].tolist(),
                    y0=place,
                    orientation="h",
                    boxpoints=False if len(values) > 400 else "all",
                    jitter=0.4,
                    pointpos=0,
                    marker={"color": method.colour, "size": 4, "opacity": 0.5},
                    line={"color": method.colour},
                    boxmean=True,
                    type="box",
                )
            )
            if worst := method.scores(kind, "worst_decile"):
                marker = {"color": method.colour, "symbol": "diamond-open", "size": 12, "line": {"width": 2}}
                more = {"hovertemplate": "worst tenth %{x:.4~f}", "type": "scatter", "mode": "markers"}
                data.append(trace(method, kind, x=[mean(worst)], y=[place], marker=marker, **more))
    if not data:
        return None
    note = "Clients of all seeds. Box: quartiles, median and (dashed) mean; open diamond: mean of the worst tenth."
    ticks = {"tickvals": [plain(p) for p in places], "ticktext": [plain(short(p)) for p in places]}
    axis = {"autorange": "reversed", "type": "category", **ticks}
    made = chart("distribution", "Distribution of scores over clients", note, data, unit(methods), "", yaxis=axis)
    return {**made, "height": 90 + _ROW * len(places)}


def fairness(methods: Sequence[Method]) -> Chart | None:
    """Return the chart of the variance of losses against the score."""
    data = []
    for method in methods:
        for kind in method.kinds:
            score, variance = method.scores(kind), method.scores(kind, "loss_variance")
            if score and variance:
                marker = {"color": method.colour, "symbol": SYMBOLS[kind], "size": 11}
                more = {"hovertemplate": "%{x:.4~f}, variance %{y:.3~g}", "type": "scatter", "mode": "markers"}
                data.append(trace(method, kind, x=[mean(score)], y=[mean(variance)], marker=marker, **more))
    if len(data) < 2:
        return None
    better = "right" if methods[0].higher_is_better else "left"
    note = f"Lower {better} is better: good scores, and losses that differ little between clients."
    return chart("fairness", "Score against fairness", note, data, unit(methods), "variance of losses over clients")
