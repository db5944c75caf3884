"""The commands `equipoise data`: list and download data sets."""

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

from equipoise.cli.command_group import CommandGroup
from equipoise.cli.console import Data, err_console, interrupted, out_console, progress_bar, show_run

data_app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None, help="List and download data sets."
)


@data_app.command("list")
def data_list(data: Data = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List data sets and where they are.

    \b
        equipoise data list
        equipoise data list --data /data

    For each data set you see whether it is complete, only a subset, or missing.
    """
    from dataclasses import asdict

    from equipoise.data.catalogue import entries
    from equipoise.data.sources import data_folder
    from equipoise.reporting.fitted_table import FittedTable

    folder = data_folder(data)
    found = entries(folder)
    if as_json:
        print(json.dumps([asdict(entry) for entry in found], indent=2))
        return
    body = [[e.name, e.state, "\n".join(filter(None, (e.detail, e.where)))] for e in found]
    head = ["data set", "state", "what and where"]
    out_console.print(FittedTable(head, body, words=head))
    out_console.print(
        f"Data folder: {escape(str(folder))}; choose another with --data or $EQUIPOISE_DATA.", highlight=False
    )


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a data set, as in `equipoise data list`.")],
    data: Data = None,
    mirror: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="Web folder that has files with the same names.")
    ] = None,
) -> None:
    """Download a data set into the data folder.

    \b
        equipoise data get cifar10
        equipoise data get cifar10 --data /data --from https://mirror.example/cifar10

    Files come from the publisher unless --from names another source. To resume an interrupted download, repeat the
    command. Checksums, or at least counts, are verified, and a file gets its final name only when it is complete.
    Existing files are kept.
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
            entry = verify(name, folder, show_run(reading, name).on_data_progress)
    except KeyboardInterrupt:
        interrupted("stopped, the partial download is kept", shlex.join(["equipoise", *sys.argv[1:]]))
    out_console.print(
        f"{entry.name}: {entry.state}, {escape(entry.detail)}, in {escape(entry.where)}",
        highlight=False,
        soft_wrap=True,
    )
