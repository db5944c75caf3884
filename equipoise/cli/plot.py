"""The command `equipoise plot`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import out_console
from equipoise.cli.report import All, finished


class Plot(StrEnum):
    """Kinds of pictures."""

    scores = "scores"
    losses = "losses"
    attacks = "attacks"
    fairness = "fairness"
    duals = "duals"
    learned = "learned"


def plot(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Run folders, folders of run folders, or records.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Picture to write (.png, .pdf or .svg).")],
    kind: Annotated[Plot, typer.Option("--kind", help="What to draw.")] = Plot.scores,
    all_: All = False,
) -> None:
    """Draw a picture of runs.

    \b
        equipoise plot runs/ditto runs/fedavg --out scores.png
        equipoise plot runs/flame --kind fairness --out fairness.pdf

    \b
    The kinds of picture:
        scores    test scores against rounds
        losses    test losses against rounds
        attacks   scores of benign clients against the fraction of malicious ones
        fairness  variance of test losses over clients against the mean score
        duals     lengths of duals and distances from the consensus against rounds (FLAME, FedADMM, FeDEQ)
        learned   how strongly learn2pfed ties clients' parameters to each other

    A line or a point is the mean of runs that differ only in the seed, and a band or a bar is their standard deviation.
    For a paper write FILE.pdf or FILE.svg: text in them is text, and the same runs give the same bytes. Unfinished and
    failed runs, and runs that tuning rejected, are skipped with a message.
    """
    from equipoise.reporting import plots
    from equipoise.reporting.figure_files import check_picture

    check_picture(out)
    plots.draw(kind.value, finished(folders, all_, records=True)[0], out)
    out_console.print(f"Picture: {escape(str(out))}", highlight=False)
