"""Forecasts in the comparison of runs: scores in the data's own unit, beside forecasts that need no model."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from equipoise.reporting.fitted_table import FittedTable
from equipoise.storage.run_index import FinishedRun

NAIVE = ("last", "daily", "weekly")
"""Forecasts that need no model; they are the same for all runs on the same data."""
_MODELS = ("personal", "global", "unseen personal", "unseen global")
_SHOWN = {
    **{"mae": "MAE", "rmse": "RMSE", "wape": "WAPE %", "mase": "MASE", "skill": "skill %", "mae_pooled": "pooled MAE"},
    **{"coverage": "coverage %", "width": "width"},
}
"""Figures of the table, and the titles of their columns."""
_PERCENT = ("wape", "skill", "coverage")
_NOTE = (
    "Means over clients on their test samples; pooled: all test samples together. MASE: by the error of the one-step "
    "weekly naive forecast in training; skill: 1 - MAE / MAE of the weekly naive forecast, where there is one"
)


def forecast_columns(group: Sequence[FinishedRun]) -> dict[str, Any]:
    """Return the columns of a comparison with the forecasts of runs that differ only in the seed; {} without any.

    Args:
        group: the runs.
    """
    found = [run.summary["forecast"] for run in group if "forecast" in run.summary]
    if not found:
        return {}
    columns: dict[str, Any] = {"forecast_unit": found[0].get("unit", "")}
    for model in (*NAIVE, *_MODELS):
        for figure in _SHOWN:
            values = [value for each in found if (value := _figures(each, model).get(figure)) is not None]
            name = f"forecast_{model}_{figure}".replace(" ", "_")
            columns[name] = mean(values) if values else None
            columns[f"{name}_std"] = stdev(values) if len(values) > 1 else None
    return columns


def _figures(summary: dict[str, Any], model: str) -> dict[str, Any]:
    *outer, inner = model.split()
    for name in outer:
        summary = summary.get(name, {})
    figures: dict[str, Any] = summary.get(inner, {})
    return figures


def has_forecasts(rows: Sequence[dict[str, Any]]) -> bool:
    """Tell whether any row of a comparison has forecasts."""
    return any(row.get("forecast_unit") is not None for row in rows)


def forecast_cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and body of the table of forecasts: for each data set the naive ones, then one row per model."""
    rows = [row for row in rows if row.get("forecast_unit") is not None]
    named = [key for key in ("data", "settings") if len({row[key] for row in rows}) > 1]
    shown = [figure for figure in _SHOWN if any(_value(row, model, figure) for row in rows for model in _MODELS)]
    naive: dict[tuple[Any, ...], list[list[str]]] = {}
    models: dict[tuple[Any, ...], list[list[str]]] = {}
    for row in rows:
        same = (row["data"], *(_value(row, model, figure) for model in NAIVE for figure in _SHOWN))
        first = [row["data"] if key == "data" else "" for key in named]
        naive.setdefault(same, [["naive", *first, model, *_texts(row, model, shown)] for model in NAIVE])
        first = [row["algorithm"], *(row[key] for key in named)]
        there = [model for model in _MODELS if any(_value(row, model, figure) is not None for figure in shown)]
        models.setdefault(same, []).extend([*first, model, *_texts(row, model, shown)] for model in there)
    body = [line for same in naive for line in [*naive[same], *models[same]]]
    return ["algorithm", *named, "model", *(_SHOWN[figure] for figure in shown)], body


def forecast_note(rows: Sequence[dict[str, Any]]) -> str:
    """Return the meaning of the columns, and the units."""
    units = ", ".join(dict.fromkeys(row["forecast_unit"] for row in rows if row.get("forecast_unit")))
    return f"{_NOTE}{f'. Unit: {units}' if units else ''}"


def forecast_table(rows: Sequence[dict[str, Any]]) -> FittedTable:
    """Return the forecasts of a comparison as a table for the terminal."""
    head, body = forecast_cells(rows)
    words, secondary = ("algorithm", "data", "settings", "model"), ("width", "coverage %", "pooled MAE", "WAPE %")
    return FittedTable(head, body, words, secondary, below="settings", title="Forecasts", note=forecast_note(rows))


def _value(row: dict[str, Any], model: str, figure: str) -> float | None:
    value: float | None = row.get(f"forecast_{model}_{figure}".replace(" ", "_"))
    return value


def _texts(row: dict[str, Any], model: str, shown: Sequence[str]) -> list[str]:
    texts = []
    for figure in shown:
        value, deviation = _value(row, model, figure), _value(row, model, f"{figure}_std")
        scale, form = (100, ".1f") if figure in _PERCENT else (1, ".4g")
        text = "–" if value is None else format(scale * value, form)
        texts.append(text if deviation is None or value is None else f"{text} ± {format(scale * deviation, '.2g')}")
    return texts
