"""The command `equipoise compare`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.console import out_console
from equipoise.cli.report import All, finished


class Format(StrEnum):
    """Formats of the table."""

    table = "table"
    md = "md"
    csv = "csv"
    json = "json"
    latex = "latex"


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Run folders, folders of run folders, or records.")
    ],
    format: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.table,
    fairness: Annotated[bool, typer.Option("--fairness", help="Show how evenly scores spread over clients.")] = False,
    all_: All = False,
) -> None:
    """Compare runs in a table.

    \b
        equipoise compare runs/ditto runs/fedavg
        equipoise compare runs --format csv > runs.csv
        equipoise compare experiments/fedeq/results/body.jsonl
        equipoise compare runs --format latex > table.tex

    Runs that differ only in the seed are one row, with mean ± standard deviation. If runs have several metrics, a
    second table shows all of them. Unfinished and failed runs, and runs
    that the tuning of their sweep rejected, are skipped with a message; --all includes the rejected ones.

    latex is a table for the package booktabs. Among the rows with the same data, the best figure of a column is bold.
    """
    from equipoise.reporting import comparison, comparison_table, forecast_table, latex

    runs = finished(folders, all_, records=True)[0]
    rows, others = comparison.compare(runs), comparison.other_metrics(runs)
    if format is Format.table:
        out_console.print(comparison_table.as_table(rows, fairness))
        if others and not fairness:
            out_console.print(comparison_table.metrics_table(rows, others))
        if forecast_table.has_forecasts(rows) and not fairness:
            out_console.print(forecast_table.forecast_table(rows))
    elif format is Format.latex:
        print(latex.as_latex(runs, fairness))
    else:
        print(comparison_table.as_text(rows, format.value, fairness, [] if fairness else others))
