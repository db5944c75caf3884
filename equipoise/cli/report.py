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


def finished(folders: list[Path], rejected: bool = False) -> "tuple[list[FinishedRun], list[str]]":
    """Return the runs to compare in these folders, and sentences about those that are skipped, which are printed."""
    from equipoise.storage.run_index import search_runs

    found, skipped = search_runs(folders, rejected)
    sentences = skipped.sentences()
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
