"""The command `equipoise cka`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import Data, out_console, progress_bar


def cka(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Picture (.png, .pdf, .svg); default: cka.png in the first run."),
    ] = None,
    data: Data = None,
    samples: Annotated[
        int, typer.Option("--samples", min=2, max=5000, help="Number of test samples to compare models on.")
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare clients' models with the global model, layer by layer.

    \b
        equipoise cka runs/ditto
        equipoise cka runs/ditto runs/fedrep --out cka.png

    The measure is linear CKA: 1 if two layers represent samples in the same way, 0 if they are unrelated.

    If a method has no personal models, the clients' models after one more local training are compared. Without a global
    model, the consensus model takes its place, or clients are compared with each other. All models represent the same
    test samples of all clients. The figures of each run are written to cka.json in its folder.
    """
    from equipoise.reporting import plots
    from equipoise.reporting.figure_files import check_picture
    from equipoise.reporting.fitted_table import FittedTable
    from equipoise.runs.launch import reopen

    picture = out or folders[0] / "cka.png"
    check_picture(picture)
    found = []
    progress = progress_bar("pairs")
    with progress:
        for folder in folders:
            bar = progress.add_task(folder.name, total=None, score="")
            result = reopen(folder, data)[0]
            step = lambda done, total, bar=bar: progress.update(bar, completed=done, total=total)  # noqa: E731
            found.append(result.similarity(samples, name=folder.resolve().name, progress=step))
            found[-1].write(folder)
    plots.draw_similarity(found, picture)
    if as_json:
        print(json.dumps([{"run": f.run, "rounds": f.rounds, "between": f.between, "cka": f.rows()} for f in found]))
        return
    for similarity in found:
        text = f"{similarity.run}, after round {similarity.rounds}: CKA of {similarity.between}"
        body = [
            [row["layer"], *(f"{row[k]:.3f}" if k in row else "–" for k in ("mean", "std", "least", "most"))]
            for row in similarity.rows()
        ]
        out_console.print(
            FittedTable(["layer", "mean", "spread", "least", "most"], body, words=["layer"], title=text), "", sep=""
        )
    out_console.print(
        f"{found[0].samples} test samples of all clients. Picture: {escape(str(picture))}", highlight=False
    )
