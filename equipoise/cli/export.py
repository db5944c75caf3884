"""The command `equipoise export`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import Data, out_console
from equipoise.errors import EquipoiseError


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write, .safetensors.")],
    client: Annotated[str | None, typer.Option("--client", metavar="K", help="A client's number or name.")] = None,
    global_: Annotated[bool, typer.Option("--global", help="The global model.")] = False,
    data: Data = None,
) -> None:
    """Write a personal model or the global one as safetensors; equipoise.load_model(FILE) loads it again."""
    from equipoise.runs.export import export_model
    from equipoise.runs.launch import reopen

    if (client is None) == (not global_):
        raise EquipoiseError("say which model to export: either --client K or --global")
    result, experiment = reopen(folder, data)
    name = export_model(result, experiment, client, out)
    out_console.print(
        escape(f"The model of {name} is in {out}; load it with equipoise.load_model({str(out)!r})"), highlight=False
    )
