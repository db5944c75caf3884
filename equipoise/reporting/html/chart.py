"""Common parts of all charts of a report: methods, colours, and charts as the dictionaries that plotly.js takes.

The `meta` of a trace names its method and its kind of model, so that the page can switch them on and off.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from equipoise.storage.model_kinds import KINDS
from equipoise.storage.run_index import FinishedRun, higher_is_better

Chart = dict[str, Any]
Trace = dict[str, Any]
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56a0d3"),
    *("#8c564b", "#7f7f7f", "#6a3d9a", "#a6761d", "#1b7837", "#e7298a"),
)
"""Colours that most people can distinguish, with enough contrast on white and on black."""
DASHES = {"personal": "solid", "consensus": "longdashdot", "global": "dash", "hybrid": "dot", "oracle": "dashdot"}
SYMBOLS = {"personal": "circle", "consensus": "triangle-up", "global": "square", "hybrid": "star", "oracle": "x"}


@dataclass(frozen=True)
class Method:
    """Runs that differ only in the seed."""

    number: int
    name: str
    runs: list[FinishedRun]

    @property
    def colour(self) -> str:
        """Return the colour of the method in all charts."""
        return COLOURS[self.number % len(COLOURS)]

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the settings of the first run."""
        return self.runs[0].config

    @property
    def metric(self) -> str:
        """Return the name of the metric."""
        return str(self.runs[0].summary["metric"])

    @property
    def higher_is_better(self) -> bool:
        """Tell whether higher values of the metric are better."""
        return higher_is_better(self.runs[0].summary)

    @property
    def scale(self) -> float:
        """Return the factor of shown scores: accuracies are shown in %."""
        return 100.0 if self.metric == "accuracy" else 1.0

    @cached_property
    def kinds(self) -> list[str]:
        """Return the kinds of models that are scored with every seed."""
        return [kind for kind in KINDS if all(run.summary.get(kind) for run in self.runs)]

    def scores(self, kind: str, field: str = "") -> list[float]:
        """Return a figure of every seed that has it, accuracies in %."""
        found = [run.summary.get(kind, {}).get(field or self.metric) for run in self.runs]
        scale = self.scale if not field or field == "worst_decile" else 1.0
        return [scale * value for value in found if value is not None]

    def settings(self, *apart: str) -> str:
        """Return all settings except the seed and those with these prefixes, as JSON."""
        kept = {k: v for k, v in self.config.items() if k != "seed" and not k.startswith(apart)}
        return json.dumps([kept, self.runs[0].summary["dataset"]], sort_keys=True)


def plain(text: str) -> str:
    """Escape a text, because plotly.js interprets a few HTML tags."""
    return html.escape(text, quote=False)


def short(text: str, most: int = 30) -> str:
    """Shorten a text to this many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def unit(methods: Sequence[Method]) -> str:
    """Return the title of an axis of scores."""
    metric = methods[0].metric
    return "test accuracy (%)" if metric == "accuracy" else f"test {metric}"


def trace(method: Method, kind: str, **more: Any) -> Trace:
    """Return a trace of one method and one kind of model, with further attributes of plotly.js."""
    return {"name": plain(f"{method.name} ({kind})"), "meta": {"method": method.number, "kind": kind}, **more}


def chart(id: str, title: str, note: str, data: list[Trace], x: str, y: str, **layout: Any) -> Chart:
    """Return a chart.

    Args:
        id: unique name within the page.
        title: heading.
        note: explanation below the heading.
        data: traces.
        x: title of the horizontal axis.
        y: title of the vertical axis.
        layout: further attributes of the layout of plotly.js.
    """
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return {"id": id, "title": title, "note": note, "data": data, "layout": {**axes, **layout}}
