"""The command that makes a page of runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import err_console, out_console
from equipoise.errors import EquipoiseError

if TYPE_CHECKING:
    from equipoise.storage.run_index import FinishedRun


def finished(folders: list[Path]) -> "tuple[list[FinishedRun], int]":
    """The runs that are done; how many are not is said, and told."""
    from equipoise.storage.run_index import find_runs, unfinished

    found = find_runs(folders)
    if left := len(unfinished(folders)):
        err_console.print(f"equipoise: {left} runs are not finished and left out", highlight=False)
    return found, left


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders of run folders.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", help="What stands at its head.")] = "",
) -> None:
    """One HTML file about runs: charts to look into, a table to sort, the papers' figures, the configuration.

    \b
        equipoise report runs/ditto runs/fedavg --out report.html
        equipoise report runs/flame --out flame.html          all that `equipoise reproduce` ran of a paper

    It needs no network and no other file, so it can be sent by mail and opened in twenty years. In it are scores and
    losses against rounds with bands over seeds, scores against bytes, personal against global models client by client,
    how evenly clients are served, scores under attack, who has which labels, what Learn2pFed shares, and layers' CKA
    (`equipoise cka` first), each where the runs have it.
    """
    from equipoise.reporting import html

    if out.suffix.lower() not in (".html", ".htm"):
        raise EquipoiseError(f"--out {out} is not allowed; the page is an HTML file, so name it FILE.html")
    found, left = finished(folders)
    with err_console.status("drawing"):
        names = ", ".join(folder.resolve().name for folder in folders)
        html.write(found, out, title or f"Runs: {names}", folders, left)
    size = out.stat().st_size / 1e6
    out_console.print(
        f"Page: {escape(str(out))} ({size:.1f} MB); open it in a browser", highlight=False, soft_wrap=True
    )
