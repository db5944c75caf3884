"""The command that compares representations."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from equipoise.cli.console import Data, out_console, progress_bar
from equipoise.errors import EquipoiseError


def cka(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="The folders of runs.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.png", help="The picture; else cka.png in the first run.")
    ] = None,
    data: Data = None,
    samples: Annotated[
        int, typer.Option("--samples", min=2, max=5000, help="Test samples that models are compared on.")
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """How alike clients' models and the global one represent samples, layer by layer (linear CKA: 1 is alike, 0 not).

    Compared are personal models or, where a method has none, models after one more local training, before they are
    averaged. Without a global model the consensus stands for it, or clients are compared with each other. All are asked
    about the same test samples, of all clients. Every run folder gets its figures in cka.json.
    """
    from equipoise.reporting import plots
    from equipoise.runs.launch import reopen
    from equipoise.runs.similarity import measure

    picture = out or folders[0] / "cka.png"
    if picture.suffix.lower() != ".png":
        raise EquipoiseError(f"--out {picture} is not allowed; the picture is a PNG file, so name it FILE.png")
    found = []
    progress = progress_bar("pairs")
    with progress:
        for folder in folders:
            bar = progress.add_task(folder.name, total=None, score="")
            run = reopen(folder, data)[0].simulation
            step = lambda done, total, bar=bar: progress.update(bar, completed=done, total=total)  # noqa: E731
            found.append(measure(run, folder.resolve().name, samples, step))
            found[-1].write(folder)
    plots.draw_similarity(found, picture)
    if as_json:
        print(json.dumps([{"run": f.run, "rounds": f.rounds, "between": f.between, "cka": f.rows()} for f in found]))
        return
    for similarity in found:
        text = f"{similarity.run}, after round {similarity.rounds}: CKA of {similarity.between}"
        table = Table(title=escape(text), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("layer", "mean", "spread", "least", "most"):
            table.add_column(column, justify="left" if column == "layer" else "right", overflow="fold")
        for row in similarity.rows():
            figures = [f"{row[k]:.3f}" if k in row else "–" for k in ("mean", "std", "least", "most")]
            table.add_row(escape(row["layer"]), *figures)
        out_console.print(table)
    out_console.print(
        f"{found[0].samples} test samples of all clients. Picture: {escape(str(picture))}", highlight=False
    )
