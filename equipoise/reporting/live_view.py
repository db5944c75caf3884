"""A run as its folder shows it: how far it is, when it will end, its curves, its slowest clients."""

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

from equipoise.model_kinds import KINDS
from equipoise.storage.run_folder import RunFolder, read_toml

_RECENT = 20
"""Rounds by which those to come are judged."""
_COLOURS = {"personal": "cyan", "consensus": "yellow", "global": "magenta", "hybrid": "green", "oracle": "white"}
_EVENTS = 3
_AXES = 28
"""Columns that plotille needs beside the field of a chart."""


@dataclass(frozen=True)
class RunView:
    """What a folder shows at one moment."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    events: list[dict[str, Any]]
    summary: dict[str, Any] | None
    working: bool
    "is a process at work in the folder?"

    @staticmethod
    def at(path: Path) -> "RunView":
        folder = RunFolder.open(path)
        working = folder.at_work_now()  # first: a run that ends meanwhile has its summary by then
        summary = folder.read_summary() if folder.summary.exists() else None
        metrics, timings, events = map(folder.read, (folder.metrics, folder.timings, folder.events))
        return RunView(path, read_toml(folder.config), metrics, timings, events, summary, working)

    @property
    def rounds(self) -> int:
        return int(self.config.get("rounds", 0))

    @property
    def done(self) -> int:
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def seconds(self) -> float:
        """Of all rounds so far."""
        return sum(map(_spent, self.timings))

    @property
    def left(self) -> float | None:
        """Seconds until all rounds are done, as the latest ones went."""
        if not self.timings:
            return None
        return (self.rounds - self.done) * mean(map(_spent, self.timings[-_RECENT:]))

    @property
    def state(self) -> str:
        if self.summary is not None:
            return "finished"
        return "at work" if self.working else "stopped"

    def curves(self, field: str = "") -> dict[str, tuple[list[int], list[float]]]:
        """Of every kind of model that is scored: rounds, and scores (accuracies in %) or another of its figures."""
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
        scores = [line[kind] for line in self.metrics for kind in KINDS if line.get(kind)]
        return next(iter(scores[0])) if scores else ""

    def slowest(self) -> list[tuple[str, float, int]]:
        """Clients that took longest in the latest rounds: their mean seconds, and in how many of these rounds they were
        among the slowest."""
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
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def chart(curves: dict[str, tuple[list[int], list[float]]], rounds: int, title: str, size: tuple[int, int]) -> str:
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


def render(look: RunView, width: int, height: int) -> RenderableType:
    """The look as it is shown, in so many columns and about so many lines."""
    method, data = (look.config.get(section, {}).get("name") for section in ("algorithm", "data"))
    name = f"{method or 'a run'} on {data or 'own data'}"
    parts: list[RenderableType] = [Text.from_markup(f"[bold]{escape(str(look.path))}[/bold]  {escape(name)}")]
    bar = Table.grid(padding=(0, 2, 0, 0))
    left = "" if look.summary is not None else f"left {clock(look.left)}"
    progress = ProgressBar(total=look.rounds, completed=look.done, width=max(10, width // 3))
    bar.add_row(progress, f"{look.done}/{look.rounds} rounds", clock(look.seconds), left, look.state)
    parts.append(bar)
    curves = look.curves()
    if curves:
        parts.append(_scores(look, curves))
        size = max(20, width - _AXES), min(18, max(5, height - 16))
        title = "test accuracy (%)" if look.metric == "accuracy" else f"test {look.metric}"
        parts += list(AnsiDecoder().decode(chart(curves, max(look.rounds, look.done), title, size)))
    elif look.metrics:
        why = (
            "there are no test samples to score models on"
            if look.summary is not None
            else "no model has been scored yet"
        )
        parts.append(Text(why, style="dim"))
    else:
        parts.append(Text("no round is done yet", style="dim"))
    if slow := look.slowest():
        counted = min(_RECENT, len(look.timings))
        shown = ", ".join(f"{who} {seconds:.3g} s ({count}/{counted})" for who, seconds, count in slow)
        parts.append(Text.assemble(("slowest clients ", "dim"), shown, (" (rounds among the slowest)", "dim")))
    for event in [event for event in look.events if "text" in event][-_EVENTS:]:
        parts.append(Text(f"round {event['round']}: {event['text']}", style="yellow"))
    return Group(*parts)


def _scores(look: RunView, curves: dict[str, tuple[list[int], list[float]]]) -> Text:
    losses, unit = look.curves("loss"), "%" if look.metric == "accuracy" else ""
    text = Text()
    for kind, (_, values) in curves.items():
        text.append("⣿ ", style=_COLOURS[kind])
        loss = f" (loss {losses[kind][1][-1]:.4g})" if kind in losses else ""
        text.append(f"{kind} {values[-1]:.4g}{unit}{loss}   ")
    if look.done and (last := max(rounds[-1] for rounds, _ in curves.values())) < look.done:
        text.append(f"scored after round {last}", style="dim")
    return text
