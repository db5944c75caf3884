"""The command `equipoise export`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import Data, out_console
from equipoise.errors import EquipoiseError


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write (.safetensors).")],
    client: Annotated[str | None, typer.Option("--client", metavar="K", help="Number or name of a client.")] = None,
    global_: Annotated[bool, typer.Option("--global", help="Export the global model.")] = False,
    data: Data = None,
) -> None:
    """Export a personal model or the global model as safetensors.

    \b
        equipoise export runs/ditto --client 0 --out client-0.safetensors
        equipoise export runs/ditto --global --out global.safetensors

    Load the file with equipoise.load_model(FILE). For a run made from Python, also give a module like the one that was
    trained: equipoise.load_model(FILE, module=Net()).
    """
    from equipoise.runs.export import export_model

    if (client is None) == (not global_):
        raise EquipoiseError("name the model to export: either --client K or --global")
    name, own = export_model(folder, client, out, data)
    load = f"equipoise.load_model({str(out)!r}{', module=Net()' if own else ''})"
    out_console.print(escape(f"The model of {name} is in {out}; load it with {load}"), highlight=False, soft_wrap=True)
