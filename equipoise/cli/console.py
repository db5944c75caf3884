"""Helpers of all commands: output streams, common options, progress bars."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from equipoise.callbacks import progress as progress_callbacks

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
Back = Annotated[
    int,
    typer.Option("--back", metavar="N", min=0, help="With --resume: go back to the Nth checkpoint before the newest."),
]


def progress_bar(unit: str = "rounds") -> Progress:
    """Return a progress bar on stderr that counts these units."""
    return progress_callbacks.progress_bar(err_console, unit)


def show_run(bar: Progress | None, name: str) -> progress_callbacks.BarCallback:
    """Return a callback that shows a run on a bar, if there is one, and its messages on stderr."""
    return progress_callbacks.BarCallback(bar, name, err_console)


def interrupted(what: str, command: str) -> NoReturn:
    """Print what was interrupted and the command that resumes it, and exit."""
    err_console.print(f"equipoise: {escape(what)}; resume with:\n  {escape(command)}", highlight=False, soft_wrap=True)
    raise SystemExit(130)
