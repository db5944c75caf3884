"""The chart of forecast errors by step of the horizon, beside forecasts that need no model."""

from collections.abc import Sequence
from statistics import mean

from equipoise.reporting.forecast_table import NAIVE
from equipoise.reporting.html.chart import DASHES, SYMBOLS, Chart, Method, Trace, chart, trace

_GREYS = {"last": "#999999", "daily": "#666666", "weekly": "#333333"}
_NOTE = "On test samples in the data's own unit, mean over clients and seeds. Grey: forecasts that need no model."


def by_step(methods: Sequence[Method]) -> Chart | None:
    """Return the chart of mean absolute errors against the step of the horizon, or None without forecasts."""
    data: list[Trace] = []
    for method in methods:
        for kind in method.kinds:
            data += [trace(method, kind, **_line(errors, method.colour, DASHES[kind], SYMBOLS[kind]))
                     for errors in _errors(method, kind)]  # fmt: skip
    first = next((method for method in methods if _errors(method, "weekly")), None)
    if first is None:
        return None
    for naive in NAIVE:
        data += [
            {"name": f"naive: {naive}", **_line(errors, _GREYS[naive], "dot", "circle")}
            for errors in _errors(first, naive)
        ]
    unit = first.runs[0].summary["forecast"].get("unit", "")
    axis = f"mean absolute error{f' ({unit})' if unit else ''}"
    return chart("forecasts", "Forecast error by step", _NOTE, data, "step of the horizon", axis)


def _errors(method: Method, model: str) -> list[list[float]]:
    """Return the mean errors of a model over seeds, one per step, in a list; an empty list if not all are defined."""
    steps = [run.summary.get("forecast", {}).get(model, {}).get("steps", []) for run in method.runs]
    if not all(steps) or any(value is None for errors in steps for value in errors):
        return []
    return [[mean(values) for values in zip(*steps, strict=True)]]


def _line(errors: list[float], colour: str, dash: str, symbol: str) -> Trace:
    return {
        "x": list(range(1, len(errors) + 1)),
        "y": errors,
        "mode": "lines+markers",
        "line": {"color": colour, "dash": dash, "width": 2},
        "marker": {"symbol": symbol, "size": 6},
        "hovertemplate": "%{x}: %{y:.4~f}",
        "type": "scatter",
    }
