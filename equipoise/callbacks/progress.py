"""Progress of a run: a bar in a terminal, a few lines in notebooks and logs."""

import sys
from typing import Any, ClassVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from equipoise.callbacks.base import Callback, Line
from equipoise.settings import Count

_LINES = 10
"""Number of lines that a whole run prints where there is no bar."""


def progress_bar(console: Console, unit: str = "rounds") -> RichProgress:
    """Return a progress bar that counts these units."""
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[score]}"),
        console=console,
    )


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


def describe_scores(line: Line) -> str:
    """Return the scores of a round in a few words; an empty string if it has none."""
    texts = []
    for kind in ("personal", "global"):
        name, score = next(iter(line.get(kind, {}).items()), ("", None))
        if score is not None:
            texts.append(f"{kind} {100 * score:.1f}%" if name == "accuracy" else f"{kind} {score:.4g}")
    return " ".join(texts)


class BarCallback(Callback):
    """Shows a run on a bar that somebody else starts and stops, and prints its messages."""

    affects_results: ClassVar[bool] = False

    def __init__(self, bar: RichProgress | None, name: str, console: Console | None = None):
        """Create the callback.

        Args:
            bar: the bar; None shows messages only.
            name: what is written before the bar.
            console: where messages are printed; None prints none.
        """
        super().__init__()
        self.bar, self.console, self.done = bar, console, 0
        self.task = None if bar is None else bar.add_task(name, total=None, score="")

    def on_data_progress(self, done: int, total: int) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, total=total, completed=done, score="(reading the data)")

    def on_run_begin(self) -> None:
        self.done = self.run.done
        if self.bar is not None and self.task is not None:
            self.bar.reset(self.task, total=self.run.rounds, completed=self.done, score="")

    def on_round_end(self, line: Line) -> None:
        self.done = line["round"]
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=self.done)
            if text := describe_scores(line):
                self.bar.update(self.task, score=text)

    def on_message(self, text: str) -> None:
        if self.console is not None:
            self.console.print(f"equipoise: {escape(text)}", highlight=False, soft_wrap=True)  # paths stay whole


class Progress(Callback):
    """Shows the progress of a run on stderr: a bar in a terminal, a line every few rounds elsewhere."""

    affects_results: ClassVar[bool] = False
    every: Count | None = None
    "number of rounds between two lines where there is no terminal; if left out, a tenth of all rounds"

    def on_run_begin(self) -> None:
        console = Console(stderr=True)
        self.bar: RichProgress | None = None
        self.last: Line | None = None
        "the line of the last round, as long as it is not printed"
        if console.is_terminal and not in_notebook():
            self.bar = progress_bar(console)
            name = self.run.settings.get("algorithm", {}).get("name", "")
            self.shown = BarCallback(self.bar, name)
            self.shown.attach(self.run)
            self.bar.start()
            self.shown.on_run_begin()

    def on_round_end(self, line: Line) -> None:
        if self.bar is not None:
            self.shown.on_round_end(line)
            return
        every = self.every or max(1, self.run.rounds // _LINES)
        self.last = line
        if line["round"] % every == 0:
            self._print()

    def _print(self) -> None:
        if self.last is not None:
            text = f"round {self.last['round']} of {self.run.rounds}  {describe_scores(self.last)}".rstrip()
            print(text, file=sys.stdout if in_notebook() else sys.stderr)
            self.last = None

    def on_run_end(self, summary: dict[str, Any]) -> None:
        self._close()
        if self.bar is None:
            self._print()

    def on_interrupt(self, failed: bool) -> None:
        self._close()

    def _close(self) -> None:
        bar: RichProgress | None = vars(self).get("bar")  # none if the run failed before it began
        if bar is not None:
            bar.stop()


def progress_from_python(wanted: bool | None) -> list[Callback]:
    """Return the callback that shows a run that was started from Python, if it is to be shown.

    Args:
        wanted: True or False; None shows progress in terminals and notebooks only.
    """
    if wanted is None:
        wanted = in_notebook() or sys.stderr.isatty()
    return [Progress()] if wanted else []
