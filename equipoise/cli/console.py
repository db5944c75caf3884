"""Helpers of all commands: output streams, common options, progress bars."""

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from equipoise.callbacks.base import RunCallback

out_console, err_console = Console(), Console(stderr=True)

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting: --set algorithm.lr=0.1 --set seed=1"),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Output folder.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Folder of data sets; default: $EQUIPOISE_DATA, else ./data."),
]


def progress_bar(unit: str = "rounds") -> Progress:
    """Return a progress bar on stderr that counts these units."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[score]}"),
        console=err_console,
    )


class ProgressCallback(RunCallback):
    """A callback that shows a run on a progress bar."""

    def __init__(self, progress: Progress | None, name: str):
        self.progress = progress
        self.bar = None if progress is None else progress.add_task(name, total=None, score="")
        self.done = 0

    def on_data_progress(self, done: int, total: int) -> None:
        """Show how much of the data has been read."""
        if self.progress is not None and self.bar is not None:
            self.progress.update(self.bar, total=total, completed=done, score="(reading the data)")

    def on_run_begin(self, rounds: int, done: int) -> None:
        """Start the bar at the finished rounds."""
        self.done = done
        if self.progress is not None and self.bar is not None:
            self.progress.reset(self.bar, total=rounds, completed=done, score="")

    def on_round_end(self, line: dict[str, Any]) -> None:
        """Advance the bar and show the latest scores."""
        self.done = line["round"]
        if self.progress is not None and self.bar is not None:
            texts = []
            for kind in ("personal", "global"):
                name, score = next(iter(line.get(kind, {}).items()), ("", None))
                if score is not None:
                    texts.append(f"{kind} {100 * score:.1f}%" if name == "accuracy" else f"{kind} {score:.4g}")
            self.progress.update(self.bar, completed=self.done)
            if texts:
                self.progress.update(self.bar, score=" ".join(texts))

    def on_message(self, text: str) -> None:
        """Print a message on stderr."""
        err_console.print(f"equipoise: {escape(text)}", highlight=False)


def interrupted(what: str, command: str) -> NoReturn:
    """Print what was interrupted and the command that resumes it, and exit."""
    err_console.print(f"equipoise: {escape(what)}; resume with:\n  {escape(command)}", highlight=False, soft_wrap=True)
    raise SystemExit(130)
