"""The live view of a run, read from its folder: progress, remaining time, curves, slowest clients."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import plotille
from rich.ansi import AnsiDecoder
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from equipoise.storage.model_kinds import KINDS
from equipoise.storage.run_folder import RunFolder, read_toml

_RECENT = 20
"""Number of latest rounds from which the remaining time is estimated."""
_COLOURS = {"personal": "cyan", "consensus": "yellow", "global": "magenta", "hybrid": "green", "oracle": "white"}
_EVENTS = 3
_AXES = 28
"""Columns that plotille needs in addition to the chart itself."""


@dataclass(frozen=True)
class RunView:
    """The contents of a run folder at one moment."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    events: list[dict[str, Any]]
    summary: dict[str, Any] | None
    working: bool
    "whether a process is working on the run"

    @staticmethod
    def at(path: Path) -> "RunView":
        """Read the run folder."""
        folder = RunFolder.open(path)
        working = folder.at_work_now()  # read first: if the run ends meanwhile, its summary exists when it is read
        summary = folder.read_summary() if folder.summary.exists() else None
        metrics, timings, events = map(folder.read, (folder.metrics, folder.timings, folder.events))
        return RunView(path, read_toml(folder.config), metrics, timings, events, summary, working)

    @property
    def rounds(self) -> int:
        """Return the number of all rounds of the run."""
        return int(self.config.get("rounds", 0))

    @property
    def done(self) -> int:
        """Return the number of finished rounds."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def seconds(self) -> float:
        """Return the seconds of all rounds so far."""
        return sum(map(_spent, self.timings))

    @property
    def left(self) -> float | None:
        """Return the estimated seconds until all rounds are done, or None if no round is."""
        if not self.timings:
            return None
        return (self.rounds - self.done) * mean(map(_spent, self.timings[-_RECENT:]))

    @property
    def state(self) -> str:
        """Return the state of the run: finished, at work or stopped."""
        if self.summary is not None:
            return "finished"
        return "at work" if self.working else "stopped"

    def curves(self, field: str = "") -> dict[str, tuple[list[int], list[float]]]:
        """Return, for each kind of model, rounds and scores (accuracies in %), or another figure of the metrics."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for line in self.metrics:
            for kind in (kind for kind in KINDS if line.get(kind)):
                name = field or next(iter(line[kind]))
                value = line[kind].get(name)
                if value is not None:
                    rounds, values = found.setdefault(kind, ([], []))
                    rounds.append(line["round"])
                    values.append(100 * value if name == "accuracy" else value)
        return found

    @property
    def metric(self) -> str:
        """Return the name of the metric, or an empty string if no model has been scored."""
        scores = [line[kind] for line in self.metrics for kind in KINDS if line.get(kind)]
        return next(iter(scores[0])) if scores else ""

    def slowest(self) -> list[tuple[str, float, int]]:
        """Return the slowest clients of the latest rounds.

        Returns:
            Their names, their mean seconds, and the number of these rounds in which they were among the slowest.
        """
        seconds: Counter[str] = Counter()
        rounds: Counter[str] = Counter()
        for line in self.timings[-_RECENT:]:
            for name, spent in line.get("slowest", {}).items():
                seconds[name] += spent
                rounds[name] += 1
        rows = [(name, seconds[name] / count, count) for name, count in rounds.items()]
        return sorted(rows, key=lambda row: (-row[2] * row[1], row[0]))[:5]


def _spent(timing: dict[str, Any]) -> float:
    return float(timing["train"] + timing["evaluate"])


def clock(seconds: float | None) -> str:
    """Return a duration as hours, minutes and seconds."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def chart(curves: dict[str, tuple[list[int], list[float]]], rounds: int, title: str, size: tuple[int, int]) -> str:
    """Draw curves as text.

    Args:
        curves: rounds and values of each kind of model.
        rounds: end of the horizontal axis.
        title: title of the vertical axis.
        size: columns and lines of the chart.
    """
    figure = plotille.Figure()
    figure.color_mode = "names"
    figure.width, figure.height = size
    figure.set_x_limits(0, rounds)
    figure.y_label, figure.x_label = title, "round"
    values = [value for _, column in curves.values() for value in column]
    low, high = min(values), max(values)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    figure.set_y_limits(low - room, high + room)
    figure.x_ticks_fkt = lambda low, high: f"{low:.0f}" if rounds > 20 else f"{low:.1f}"
    figure.y_ticks_fkt = lambda low, high: f"{low:.4g}"
    for kind, (x, y) in curves.items():
        (figure.plot if len(x) > 1 else figure.scatter)(x, y, lc=_COLOURS[kind], label=kind)
    return str(figure.show(legend=False))


def render(view: RunView, width: int, height: int) -> RenderableType:
    """Return the view as it is shown, in this many columns and about this many lines."""
    method, data = (view.config.get(section, {}).get("name") for section in ("algorithm", "data"))
    name = f"{method or 'a run'} on {data or 'own data'}"
    parts: list[RenderableType] = [Text.from_markup(f"[bold]{escape(str(view.path))}[/bold]  {escape(name)}")]
    bar = Table.grid(padding=(0, 2, 0, 0))
    left = "" if view.summary is not None else f"left {clock(view.left)}"
    progress = ProgressBar(total=view.rounds, completed=view.done, width=max(10, width // 3))
    bar.add_row(progress, f"{view.done}/{view.rounds} rounds", clock(view.seconds), left, view.state)
    parts.append(bar)
    if view.summary is not None and "stopped" in view.summary:
        parts.append(Text(f"stopped early: {view.summary['stopped']}"))
    curves = view.curves()
    if curves:
        parts.append(_scores(view, curves))
        size = max(20, width - _AXES), min(18, max(5, height - 16))
        title = "test accuracy (%)" if view.metric == "accuracy" else f"test {view.metric}"
        parts += list(AnsiDecoder().decode(chart(curves, max(view.rounds, view.done), title, size)))
    elif view.metrics:
        why = (
            "there are no test samples to score models on"
            if view.summary is not None
            else "no model has been scored yet"
        )
        parts.append(Text(why, style="dim"))
    else:
        parts.append(Text("no round is done yet", style="dim"))
    if slow := view.slowest():
        counted = min(_RECENT, len(view.timings))
        shown = ", ".join(f"{who} {seconds:.3g} s ({count}/{counted})" for who, seconds, count in slow)
        parts.append(Text.assemble(("slowest clients ", "dim"), shown, (" (rounds among the slowest)", "dim")))
    for event in [event for event in view.events if "text" in event][-_EVENTS:]:
        parts.append(Text(f"round {event['round']}: {event['text']}", style="yellow"))
    return Group(*parts)


def _scores(view: RunView, curves: dict[str, tuple[list[int], list[float]]]) -> Text:
    losses, unit = view.curves("loss"), "%" if view.metric == "accuracy" else ""
    text = Text()
    for kind, (_, values) in curves.items():
        text.append("⣿ ", style=_COLOURS[kind])
        loss = f" (loss {losses[kind][1][-1]:.4g})" if kind in losses else ""
        text.append(f"{kind} {values[-1]:.4g}{unit}{loss}   ")
    if view.done and (last := max(rounds[-1] for rounds, _ in curves.values())) < view.done:
        text.append(f"scored after round {last}", style="dim")
    return text
