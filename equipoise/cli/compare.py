"""The command `equipoise compare`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.console import out_console
from equipoise.cli.report import All, finished
from equipoise.errors import EquipoiseError

if TYPE_CHECKING:
    from equipoise.storage.run_index import FinishedRun


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
    attacks: Annotated[
        bool, typer.Option("--attacks", help="Show damage and success of attacks beside the runs without them.")
    ] = False,
    paired: Annotated[
        Path | None,
        typer.Option("--paired", metavar="RUN", help="Show differences from this run (or folder of runs), by client."),
    ] = None,
    unseen: Annotated[bool, typer.Option("--unseen", help="With --paired: compare unseen clients.")] = False,
    all_: All = False,
) -> None:
    """Compare runs in a table.

    \b
        equipoise compare runs/ditto runs/fedavg
        equipoise compare runs --format csv > runs.csv
        equipoise compare experiments/fedeq/results/body.jsonl
        equipoise compare runs --format latex > table.tex
        equipoise compare runs --paired runs/local

    Runs that differ only in the seed are one row, with mean ± standard deviation. If runs have several metrics, a
    second table shows all of them. Unfinished and failed runs, and runs
    that the tuning of their sweep rejected, are skipped with a message; --all includes the rejected ones.

    Runs under attack have a table of their own, beside their controls (attack.name = "none"); --attacks shows only it,
    in every format but latex.

    Runs on time series have a table of their forecasts in the data's own unit, beside forecasts that need no model.

    latex is a table for the package booktabs. Among the rows with the same data, the best figure of a column is bold.

    --paired compares each client's score with its score in a run with the same seed and data, and shows the mean
    difference over clients with its standard error. Runs that differ only in the seed, or in data.cut, are averaged
    for each client before. --unseen compares the clients that took no part in training instead.
    """
    from equipoise.reporting import attack_table, comparison, comparison_table, forecast_table, latex

    runs = finished(folders, all_, records=True)[0]
    if unseen and paired is None:
        raise EquipoiseError("--unseen has an effect only with --paired RUN")
    if paired is not None:
        _compare_paired(runs, paired, format, all_, unseen)
        return
    attacked = attack_table.attack_rows(runs)
    if attacks:
        _show_attacks(attacked, format)
        return
    rows, others = comparison.compare(runs), comparison.other_metrics(runs)
    if format is Format.table:
        out_console.print(comparison_table.as_table(rows, fairness))
        if others and not fairness:
            out_console.print(comparison_table.metrics_table(rows, others))
        if attack_table.telling(attacked) and not fairness:
            out_console.print(attack_table.attack_table(attacked))
        if forecast_table.has_forecasts(rows) and not fairness:
            out_console.print(forecast_table.forecast_table(rows))
    elif format is Format.latex:
        print(latex.as_latex(runs, fairness))
    else:
        print(comparison_table.as_text(rows, format.value, fairness, [] if fairness else others))
        if format is Format.md and attack_table.telling(attacked) and not fairness:
            print("\n" + comparison_table.markdown(*attack_table.attack_cells(attacked), attack_table.NOTE))


def _show_attacks(rows: list[dict[str, Any]], format: Format) -> None:
    from equipoise.reporting import attack_table, comparison_table

    if not rows:
        raise EquipoiseError("none of these runs has malicious clients; add a section [attack]")
    if format is Format.latex:
        raise EquipoiseError("--attacks has no LaTeX table; use --format md, csv or json")
    if format is Format.table:
        out_console.print(attack_table.attack_table(rows))
    elif format is Format.md:
        print(comparison_table.markdown(*attack_table.attack_cells(rows), attack_table.NOTE))
    else:
        print(comparison_table.rows_as_text(rows, format.value))


def _compare_paired(runs: "list[FinishedRun]", reference: Path, format: Format, rejected: bool, unseen: bool) -> None:
    from equipoise.reporting import comparison_table
    from equipoise.reporting.paired import NOTE, paired_cells, paired_differences, paired_rows, paired_table
    from equipoise.storage.client_scores import TRAINED, UNSEEN

    if format is Format.latex:
        raise EquipoiseError("--paired has no LaTeX table; use --format md, csv or json")
    found = paired_differences(runs, finished([reference], rejected, records=True)[0], UNSEEN if unseen else TRAINED)
    if format is Format.table:
        out_console.print(paired_table(found, str(reference)))
    elif format is Format.md:
        print(comparison_table.markdown(*paired_cells(found), NOTE))
    else:
        print(comparison_table.rows_as_text(paired_rows(found), format.value))
