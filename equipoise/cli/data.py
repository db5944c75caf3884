"""The commands `equipoise data`: list data sets, and download them."""

import json
import shlex
import sys
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from equipoise.cli.console import Data, ProgressCallback, err_console, interrupted, out_console, progress_bar

data_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Data sets: what is here, and how to get more."
)


@data_app.command("list")
def data_list(
    data: Data = None, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """What is there, complete or a subset, and where it was found."""
    from dataclasses import asdict

    from equipoise.data.catalogue import entries
    from equipoise.data.sources import data_folder

    folder = data_folder(data)
    found = entries(folder)
    if as_json:
        print(json.dumps([asdict(entry) for entry in found], indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("data set", "state", "what", "where"):
        table.add_column(column, overflow="fold")
    for entry in found:
        table.add_row(entry.name, entry.state, escape(entry.detail), escape(entry.where))
    out_console.print(table)
    out_console.print(
        f"Looked in {escape(str(folder))}; --data or $EQUIPOISE_DATA names another folder.", highlight=False
    )


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set, as in `equipoise data list`.")],
    data: Data = None,
    mirror: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="A folder on the web with files of the same names.")
    ] = None,
) -> None:
    """Fetch a data set from its publisher into the data folder.

    A download that breaks off goes on where it was when the command is given again. Checksums, or at least the counts,
    are verified; a file under its own name is always whole. Files that are there already are left alone.
    """
    from equipoise.data.catalogue import download, verify
    from equipoise.data.sources import data_folder

    folder, bars = data_folder(data), dict[str, TaskID]()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=err_console) as progress:

            def meter(file: str, done: int, total: int | None) -> None:
                if file not in bars:
                    bars[file] = progress.add_task(file, total=total)
                progress.update(bars[file], completed=done, total=total)

            download(name, folder, mirror, meter)
        with progress_bar("") as reading:
            entry = verify(name, folder, ProgressCallback(reading, name).on_data_progress)
    except KeyboardInterrupt:
        interrupted("stopped; what has come is kept", shlex.join(["equipoise", *sys.argv[1:]]))
    out_console.print(
        f"{entry.name}: {entry.state}, {escape(entry.detail)}, in {escape(entry.where)}",
        highlight=False,
        soft_wrap=True,
    )
