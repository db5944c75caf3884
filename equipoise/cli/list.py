"""The command `equipoise list`."""

import json
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from equipoise.cli.console import out_console


class Kind(StrEnum):
    algorithms = "algorithms"
    models = "models"
    data = "data"
    partitions = "partitions"
    attacks = "attacks"
    reducers = "reducers"
    metrics = "metrics"
    callbacks = "callbacks"


_KINDS = f"What to list: {', '.join(Kind)}; without it, the kinds."


def list_(
    kind: Annotated[Kind | None, typer.Argument(metavar="[KIND]", help=_KINDS)] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Show only this entry, with all its settings; or own code, FILE.py:NAME."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all settings.")] = False,
) -> None:
    """List what there is to choose from, with settings, defaults and papers.

    \b
        equipoise list                       the kinds, and how many there are of each
        equipoise list algorithms            one line for each
        equipoise list algorithms ditto      its paper and all its settings
        equipoise list algorithms a.py:Mine  those of an algorithm of your own

    Plug-ins of other installed packages are listed too, each with the name of its package.
    """
    from equipoise.runs.listing import listing

    if kind is None:
        counts = {each.value: len(listing(each.value)) for each in Kind}
        if as_json:
            print(json.dumps(counts, indent=2))
            return
        _print_lines({each: f"{count:>3}  equipoise list {each}" for each, count in counts.items()})
        return
    entries = listing(kind.value, name)
    if as_json:
        print(json.dumps(entries, indent=2))
    elif name is None:
        _print_lines({entry["name"]: entry["summary"] + _origin(entry) for entry in entries})
        out_console.print(f"[dim]Settings and paper of one: equipoise list {kind.value} NAME[/dim]", highlight=False)
    else:
        for entry in entries:
            _print_entry(entry)


def _print_lines(texts: dict[str, str]) -> None:
    """Print one line per name; texts that are too long for the terminal are cut off."""
    wide = max(map(cell_len, texts), default=0)
    for name, text in texts.items():
        line = Text.assemble((name, "bold"), " " * (wide - cell_len(name) + 2), text)
        line.truncate(out_console.width, overflow="ellipsis")
        out_console.print(line, highlight=False, no_wrap=True)


def _origin(entry: dict[str, Any]) -> str:
    return f" (from {entry['package']})" if entry["package"] else ""


def _print_entry(entry: dict[str, Any]) -> None:
    """Print one entry with its paper and all its settings."""
    out_console.print(Text.assemble((entry["name"], "bold"), "  ", entry["summary"], (_origin(entry), "dim")))
    if entry["paper"]:
        out_console.print(Text(entry["paper"], style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
    table.add_column(max_width=max(24, out_console.width // 3), overflow="fold")
    table.add_column(overflow="fold")
    for row in entry["parameters"]:
        default = "" if row["default"] is None else f" = {json.dumps(row['default'])}"
        table.add_row(Text(row["name"] + default), Text.assemble(row["meaning"], (f" ({row['allowed']})", "dim")))
    if entry["parameters"]:
        out_console.print(table)
