"""Charts of each class: confusion matrices, pooled over clients, and recalls."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from equipoise.reporting.html.chart import SYMBOLS, Chart, Method, Trace, chart, trace

_MATRIX, _RECALL = "confusion-matrix_pooled", "per-class-recall_pooled"
_NUMBERED = 15
"""Largest number of classes whose counts are written into the map."""


def confusion(methods: Sequence[Method]) -> list[Chart]:
    """Return a map of the confusion matrix of each method and kind of model, pooled over clients and seeds."""
    charts = []
    for method in methods:
        for kind in method.kinds:
            found = _all(method, kind, _MATRIX)
            if not found:
                continue
            counts = np.sum(found, axis=0)
            shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
            text = [[f"{n:g}" for n in row] for row in counts]
            cells: Trace = {
                "type": "heatmap",
                "colorscale": "Viridis",
                "z": shares.tolist(),
                "zmin": 0,
                "zmax": 1,
                "text": text,
                "hovertemplate": "class %{y} predicted as %{x}: %{text} (%{z:.1%})<extra></extra>",
                "colorbar": {"title": {"text": "share"}},
                "meta": {"method": method.number, "kind": kind},
            }
            if len(counts) <= _NUMBERED:
                cells["texttemplate"] = "%{text}"
            seeds = f", all {len(found)} seeds" if len(found) > 1 else ""
            note = (
                f"All test samples of all clients together{seeds}. Colours are shares of a true class, so that each "
                "row sums to 1; the diagonal is its recall."
            )
            axes: dict[str, Any] = {
                "xaxis": {"title": {"text": "predicted class"}, "dtick": _step(len(counts))},
                "yaxis": {"title": {"text": "true class"}, "dtick": _step(len(counts)), "autorange": "reversed"},
            }
            title = f"Confusion matrix: {method.name} ({kind})"
            charts.append(chart(f"confusion-{method.number}-{kind}", title, note, [cells], "", "", **axes))
    return charts


def recalls(methods: Sequence[Method]) -> Chart | None:
    """Return the chart of the recall of each class, pooled over clients, the mean over seeds."""
    data = []
    for method in methods:
        for kind in method.kinds:
            found = _all(method, kind, _RECALL)
            if not found:
                continue
            values = np.mean(found, axis=0)
            marker = {"color": method.colour, "symbol": SYMBOLS[kind], "size": 8}
            more = {"hovertemplate": "class %{x}: recall %{y:.3f}", "type": "scatter", "mode": "markers"}
            data.append(trace(method, kind, x=list(range(len(values))), y=values.tolist(), marker=marker, **more))
    if not data:
        return None
    note = "Share of the test samples of a class that are recognised, all clients together; mean over seeds."
    axis = {"title": {"text": "class"}, "dtick": _step(max(len(each["x"]) for each in data))}
    return chart("recalls", "Recall of each class", note, data, "", "recall", xaxis=axis)


def _all(method: Method, kind: str, field: str) -> list[np.ndarray]:
    """Return a figure of every seed that has it; null is NaN."""
    found = [run.summary[kind].get(field) for run in method.runs]
    return [np.array(each, dtype=np.float64) for each in found if each is not None]


def _step(classes: int) -> int:
    """Return the distance between two numbered classes on an axis."""
    return max(1, classes // _NUMBERED)
