"""The command `equipoise compare`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.console import out_console
from equipoise.cli.report import finished


class Format(StrEnum):
    table = "table"
    md = "md"
    csv = "csv"
    json = "json"


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Run folders, or folders of run folders.")],
    format: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.table,
    fairness: Annotated[bool, typer.Option("--fairness", help="How evenly each method serves the clients.")] = False,
) -> None:
    """A table over runs; mean ± standard deviation where runs differ only in the seed."""
    from equipoise.reporting import comparison, comparison_table

    rows = comparison.compare(finished(folders)[0])
    if format is Format.table:
        out_console.print(comparison_table.as_table(rows, fairness))
    else:
        print(comparison_table.as_text(rows, format.value, fairness))
