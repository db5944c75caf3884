"""The command `equipoise report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import err_console, out_console
from equipoise.errors import EquipoiseError

if TYPE_CHECKING:
    from equipoise.storage.run_index import FinishedRun

All = Annotated[bool, typer.Option("--all", help="Include runs that the tuning of their sweep rejected.")]


def finished(paths: list[Path], rejected: bool = False, records: bool = False) -> "tuple[list[FinishedRun], list[str]]":
    """Return the runs to compare, and sentences about those that are skipped, which are printed.

    Args:
        paths: folders of runs.
        rejected: whether to include runs that the tuning of their sweep rejected.
        records: whether files of records are allowed beside folders.
    """
    from equipoise.storage.result_records import SUFFIX, recorded_runs
    from equipoise.storage.run_index import search_runs

    files = [path for path in paths if records and path.suffix == SUFFIX and not path.is_dir()]
    folders = [path for path in paths if path not in files]
    found = [run for file in files for run in recorded_runs(file, rejected)]
    sentences = []
    if folders:
        more, skipped = search_runs(folders, rejected)
        found, sentences = [*found, *more], skipped.sentences()
    for sentence in sentences:
        err_console.print(f"equipoise: {escape(sentence)}", highlight=False, soft_wrap=True)
    return found, sentences


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders of run folders.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="Page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", help="Title of the page.")] = "",
    all_: All = False,
) -> None:
    """Write an HTML report of runs.

    \b
        equipoise report runs/ditto runs/fedavg --out report.html
        equipoise report runs/flame --out flame.html

    The report is one file that needs no network and no other files, so you can send it by mail. It has interactive
    charts, a table that you can sort, all configurations, and the comparison with a paper if `equipoise reproduce` made
    the runs. Charts show, as far as the runs have them: scores and losses against rounds, scores against bytes sent,
    personal against global models for each client, how evenly scores spread over clients, scores under attack, the
    labels of each client, what Learn2pFed shares, and the similarity of layers (run `equipoise cka` first).

    Unfinished and failed runs, and runs that tuning rejected, are skipped with a message.
    """
    from equipoise.reporting import html

    if out.suffix.lower() not in (".html", ".htm"):
        raise EquipoiseError(f"--out {out} is not allowed; the page is an HTML file, so name it FILE.html")
    found, skipped = finished(folders, all_)
    with err_console.status("drawing"):
        names = ", ".join(folder.resolve().name for folder in folders)
        html.write(found, out, title or f"Runs: {names}", folders, skipped)
    size = out.stat().st_size / 1e6
    out_console.print(
        f"Page: {escape(str(out))} ({size:.1f} MB); open it in a browser", highlight=False, soft_wrap=True
    )
