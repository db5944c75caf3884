"""The command `equipoise predict`."""

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import Data, err_console, out_console, progress_bar
from equipoise.errors import EquipoiseError

if TYPE_CHECKING:
    from equipoise.runs.forecasts import ClientForecasts

_NAMED = 3  # clients in messages


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    client: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="K", help="Number or name of a client; several times for several clients."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.csv", help="File to write; default: the terminal.")
    ] = None,
    global_: Annotated[bool, typer.Option("--global", help="Forecast with the global model.")] = False,
    level: Annotated[float, typer.Option("--level", help="Probability of the intervals.")] = 0.9,
    next_: Annotated[bool, typer.Option("--next", help="Forecast the time after the end of the data.")] = False,
    data: Data = None,
) -> None:
    """Forecast time series with the models of a run, in the data's own unit, as CSV.

    \b
        equipoise predict runs/ditto --client MT_001 --out forecasts.csv
        equipoise predict runs/ditto --client 0 --next --level 0.8
        equipoise predict runs/ditto --global --out all.csv

    One line per forecast value of the test samples: client; issued, the time of the last known value; time, the time of
    the value; step of the horizon; forecast; lower and upper end of the interval; actual; naive_weekly, the value one
    week earlier. Without --client all clients are forecast, each by its own model if the method has personal models.

    An interval is as wide as the client's validation samples ask for at this level (conformal prediction). It is
    infinite, with a message, if there are too few of them.
    """
    from equipoise.runs.forecasts import COLUMNS
    from equipoise.storage import atomic_files

    found = forecasts_of_run(folder, client or [], data, level, shared=global_, ahead=next_)
    lines = (line for each in found for line in each.lines())
    if out is None:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(lines)
        return
    with atomic_files.atomic_write(out) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(lines)
    out_console.print(f"Forecasts: {escape(str(out))}", highlight=False, soft_wrap=True)


def forecasts_of_run(
    folder: Path,
    clients: list[str],
    data: Path | None,
    level: float,
    *,
    shared: bool = False,
    ahead: bool = False,
    most: int | None = None,
) -> "list[ClientForecasts]":
    """Return the forecasts of a run, one per client, with a progress bar; warn of intervals that are infinite.

    Args:
        folder: the run folder.
        clients: numbers or names of clients; none for all that have something to forecast.
        data: the folder of data sets, or None for the one that the run used.
        level: the probability of the intervals.
        shared: whether the global model forecasts.
        ahead: whether the time after the end of the data is forecast, and not the test samples.
        most: largest number of clients if none are named.
    """
    from equipoise.evaluation.conformal import check_level
    from equipoise.runs.export import client_by_text
    from equipoise.runs.launch import reopen

    check_level(level)
    result, experiment = reopen(folder, data)
    tests = result.federation.test
    chosen = [client_by_text(result.clients, text) for text in clients] or [
        who for who in range(len(result.clients)) if ahead or len(tests[who])
    ][:most]
    for who in chosen:
        if not ahead and not len(tests[who]):
            raise EquipoiseError(
                f"client {result.clients[who]!r} has no test samples to forecast; add --next, or name another client"
            )
    found = []
    with progress_bar("clients") as progress:
        bar = progress.add_task("forecasts", total=len(chosen), score="")
        for who in chosen:
            if ahead:
                assert experiment.data is not None
                found.append(result.next_forecasts(who, experiment.data, level, shared=shared))
            else:
                found.append(result.forecasts(who, level, shared=shared))
            progress.advance(bar)
    why = [sentence for each in found if (sentence := each.why_infinite) is not None]
    more = f"; so are those of {len(why) - _NAMED} other clients" if len(why) > _NAMED else ""
    if why:
        err_console.print(f"equipoise: {escape('; '.join(why[:_NAMED]))}{more}", highlight=False, soft_wrap=True)
    return found
