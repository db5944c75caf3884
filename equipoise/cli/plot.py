"""The command `equipoise plot`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import Data, out_console
from equipoise.cli.predict import forecasts_of_run
from equipoise.cli.report import All, finished
from equipoise.errors import EquipoiseError

_PANELS = 4  # clients whose forecasts are drawn if none are named


class Plot(StrEnum):
    """Kinds of pictures."""

    scores = "scores"
    losses = "losses"
    attacks = "attacks"
    fairness = "fairness"
    duals = "duals"
    learned = "learned"
    forecast = "forecast"


def plot(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Run folders, folders of run folders, or records.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Picture to write (.png, .pdf or .svg).")],
    kind: Annotated[Plot, typer.Option("--kind", help="What to draw.")] = Plot.scores,
    client: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="K", help="forecast: number or name of a client; several times for several."),
    ] = None,
    days: Annotated[float, typer.Option("--days", min=0.01, help="forecast: number of test days to draw.")] = 7,
    level: Annotated[float, typer.Option("--level", help="forecast: probability of the intervals.")] = 0.9,
    data: Data = None,
    all_: All = False,
) -> None:
    """Draw a picture of runs.

    \b
        equipoise plot runs/ditto runs/fedavg --out scores.png
        equipoise plot runs/flame --kind fairness --out fairness.pdf
        equipoise plot runs/loads --kind forecast --client MT_001 --days 7 --out forecast.png

    \b
    The kinds of picture:
        scores    test scores against rounds
        losses    test losses against rounds
        attacks   scores of benign clients against the fraction of malicious ones
        fairness  variance of test losses over clients against the mean score
        duals     lengths of duals and distances from the consensus against rounds (FLAME, FedADMM, FeDEQ)
        learned   how strongly learn2pfed ties clients' parameters to each other
        forecast  of one run on time series, for a few clients: forecasts of the last test days with intervals, what
                  came of them, and the values one week before

    A line or a point is the mean of runs that differ only in the seed, and a band or a bar is their standard deviation.
    For a paper write FILE.pdf or FILE.svg: text in them is text, and the same runs give the same bytes. Unfinished and
    failed runs, and runs that tuning rejected, are skipped with a message.
    """
    from equipoise.reporting import plots
    from equipoise.reporting.figure_files import check_picture

    check_picture(out)
    if kind is Plot.forecast:
        _draw_forecasts(folders, client or [], data, level, days, out)
    elif client is not None:
        raise EquipoiseError(f"--client is for --kind forecast; leave it out for --kind {kind.value}")
    else:
        plots.draw(kind.value, finished(folders, all_, records=True)[0], out)
    out_console.print(f"Picture: {escape(str(out))}", highlight=False)


def _draw_forecasts(
    folders: list[Path], clients: list[str], data: Path | None, level: float, days: float, out: Path
) -> None:
    from equipoise.reporting.forecast_plot import draw_forecasts

    if len(folders) != 1:
        raise EquipoiseError(f"--kind forecast draws one run, and there are {len(folders)}; name one run folder")
    draw_forecasts(forecasts_of_run(folders[0], clients, data, level, most=_PANELS), days, out)
