"""The command `equipoise show`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from equipoise.cli.console import Data, Sets, err_console, out_console, progress_bar, show_run


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Experiment, or the run.toml of a run.")],
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Picture (.png, .pdf, .svg); default: FILE-federation.png."),
    ] = None,
    data: Data = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show what a federation looks like, in numbers and as a picture.

    \b
        equipoise show examples/digits.toml
        equipoise show examples/digits.toml --set data.clients=20 --out digits.png

    The picture shows the labels of each client, the clients' sizes, and samples of a few clients.
    """
    from equipoise.config.experiment import Experiment
    from equipoise.data.sources import data_folder
    from equipoise.data.statistics import federation_statistics
    from equipoise.reporting import federation_plot
    from equipoise.reporting.figure_files import check_picture
    from equipoise.runs.launch import folder_of_data

    target = out or Path(f"{file.stem}-federation.png")
    check_picture(target)
    experiment = Experiment.load(file, sets or [])
    with progress_bar("") as progress:
        bar = show_run(progress, experiment.data.name if experiment.data else "")
        federation = experiment.federation(
            data_folder(folder_of_data(file, data, bar.on_message)), bar.on_data_progress
        )
    with err_console.status("drawing"):
        federation_plot.draw(federation, target)
        found = federation_statistics(federation)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in found.items():
        table.add_row(name, escape(str(value) if isinstance(value, str) else f"{value:,}"))
    out_console.print(table)
    for note in federation.notes:
        out_console.print(f"Note: {escape(note)}", highlight=False)
    out_console.print(f"Picture: {escape(str(target))}", highlight=False, soft_wrap=True)
