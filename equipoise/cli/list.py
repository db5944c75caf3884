"""The command `equipoise list`."""

import json
from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from equipoise.cli.console import out_console


class Kind(StrEnum):
    algorithms = "algorithms"
    models = "models"
    data = "data"
    partitions = "partitions"
    attacks = "attacks"
    reducers = "reducers"
    callbacks = "callbacks"


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show only this entry, with all its settings.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what there is to choose from, with settings, defaults and papers.

    \b
        equipoise list algorithms
        equipoise list models deq-mlp        all settings of one model
    """
    from equipoise.runs.listing import listing

    entries = listing(kind.value, name)
    if as_json:
        print(json.dumps(entries, indent=2))
        return
    for entry in entries:
        paper = f" [dim]({escape(entry['paper'])})[/dim]" if entry["paper"] else ""
        out_console.print(f"[bold]{escape(entry['name'])}[/bold]  {escape(entry['summary'])}{paper}", highlight=False)
        shown = [row for row in entry["parameters"] if name or row["name"] not in entry["of_layer"]]
        if shown:
            table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
            for row in shown:
                default = "" if row["default"] is None else f"= {json.dumps(row['default'])}"
                table.add_row(
                    escape(row["name"]), escape(default), escape(row["meaning"]), f"[dim]{escape(row['allowed'])}[/dim]"
                )
            out_console.print(table)
        if entry["of_layer"] and not name:
            text = f"and of its layer: {', '.join(entry['of_layer'])} (equipoise list models {entry['name']})"
            out_console.print(Padding(f"[dim]{escape(text)}[/dim]", (0, 0, 0, 2)), highlight=False)
