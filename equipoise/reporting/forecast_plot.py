"""Pictures of forecasts: one panel per client with what came, the forecast, its interval and the weekly naive one."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.errors import EquipoiseError
from equipoise.reporting.figure_files import figure_file

if TYPE_CHECKING:
    from equipoise.runs.forecasts import ClientForecasts

MOST_PANELS = 12
"""Largest number of clients in one picture."""
_COLOURS = {"actual": "black", "forecast": "#0072b2", "weekly naive": "#d55e00"}
_PANEL = (5.2, 2.4)  # inches, where there are several
_TWO_COLUMNS = 3  # panels from which on they are in two columns


def draw_forecasts(found: "Sequence[ClientForecasts]", days: float, path: Path) -> None:
    """Draw the forecasts of clients for their last test days, in small multiples, and write the picture.

    Of windows that overlap, those are drawn that lie beside each other, counted from the last one.

    Args:
        found: the forecasts of each client.
        days: number of days.
        path: the file; its ending decides the format.
    """
    if len(found) > MOST_PANELS:
        raise EquipoiseError(
            f"one picture shows at most {MOST_PANELS} clients, and there are {len(found)}; name some with --client"
        )
    columns = 1 if len(found) < _TWO_COLUMNS else 2
    rows = ceil(len(found) / columns)
    size = (9.0, 4.2) if len(found) == 1 else (max(9.0, _PANEL[0] * columns), 0.8 + _PANEL[1] * rows)
    with figure_file(path, size) as figure:
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes, each in zip(panels.flat, found, strict=False):
            _panel(axes, each, days)
        for axes in panels.flat[len(found) :]:
            axes.set_axis_off()
        unit = found[0].unit
        figure.supylabel(unit or "value", fontsize="medium")
        entries = dict(zip(*reversed(panels.flat[0].get_legend_handles_labels()), strict=True))
        figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=4, frameon=False)


def _panel(axes: Any, each: "ClientForecasts", days: float) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    chosen = each.beside_each_other(days)
    times = [time for row in chosen for time in each.times[row]]
    flat = {name: getattr(each, name)[chosen].ravel() for name in ("lower", "upper", "forecast", "actual")}
    if np.isfinite(flat["upper"]).all():
        band = {"color": _COLOURS["forecast"], "alpha": 0.2, "linewidth": 0}
        axes.fill_between(times, flat["lower"], flat["upper"], label=f"{each.level:.0%} interval", **band)
    naive = each.naive_weekly[chosen].ravel()
    marker = "." if len(times) == 1 else ""
    axes.plot(times, naive, color=_COLOURS["weekly naive"], linestyle=":", label="weekly naive", marker=marker)
    axes.plot(times, flat["actual"], color=_COLOURS["actual"], linewidth=1, label="actual", marker=marker)
    axes.plot(times, flat["forecast"], color=_COLOURS["forecast"], label="forecast", marker=marker)
    locator = AutoDateLocator(minticks=3, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set_title(each.client, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.margins(x=0.01)
