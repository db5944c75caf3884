"""The command that runs many experiments from one file."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import Data, Sets, err_console, interrupted, out_console, progress_bar
from equipoise.errors import Interrupted, RunFailed


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The experiment, with lists of values in it.")],
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The folder of all its runs.")] = None,
    data: Data = None,
    scale: Annotated[
        str | None,
        typer.Option("--scale", metavar="NAME", help="Which [scale.NAME] to lay over the file; small if there is one."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=256, help="Runs at a time.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar and no table.")] = False,
) -> None:
    """Run an experiment with every combination of the values that are listed in it.

    \b
    Three strengths, two data sets' worth of labels, five seeds: 30 runs.
        seed = [0, 1, 2, 3, 4]
        [data]
        name = "fashion-mnist"
        clients = 10
        partition = [{ kind = "labels", per_client = 2 }, { kind = "dirichlet" }]
        [model]
        name = "softmax"
        [algorithm]
        name = "flame"
        lam = [0.1, 1.0, 10.0]
        [sweep]
        tune = ["algorithm.lam"]

    \b
    What belongs together stands in a variant; methods that train alike (fedavg, fedavg-ft, knn-per) train once.
        [[variant]]
        algorithm = { name = "fedeq" }
        model = { name = "deq-mlp" }
        [[variant]]
        algorithm = [{ name = "fedavg-ft" }, { name = "knn-per" }]
        model = { name = "mlp" }
        [scale.smoke]
        rounds = 2

    With `sweep.tune`, the best value is chosen on validation samples with the first seed, and the other seeds run with
    it alone: 10 runs fewer here. What is done stays done: the same command goes on where it was stopped.
    """
    from equipoise.reporting import comparison, comparison_table
    from equipoise.runs import process_pool as processes
    from equipoise.runs import sweep as sweeps
    from equipoise.storage import run_index
    from equipoise.storage.run_folder import read_toml

    every, settings = sweeps.expand_sweep(read_toml(file), scale, sets or [])
    folder = out or Path("runs") / file.stem
    progress = progress_bar("runs")
    progress.disable = quiet

    def told(cell: sweeps.SweepRun, notes: list[str]) -> None:
        progress.advance(bar)
        for note in notes:
            err_console.print(f"equipoise: {escape(note)}", highlight=False)

    def execute(wanted: list[sweeps.SweepRun], what: str = "") -> None:
        there = sum(cell.done(folder) or cell.failed(folder) for cell in wanted)
        progress.reset(bar, total=len(wanted), completed=there, score=what)
        processes.execute(wanted, folder, data, jobs, told)

    try:
        with progress:
            bar = progress.add_task(file.stem, total=None, score="")
            execute(sweeps.tuned(every, settings, folder)[0], "(choosing)")
            chosen = sweeps.tuned(every, settings, folder)[1]
            execute(chosen)
    except (Interrupted, KeyboardInterrupt):
        again = ["equipoise", "sweep", str(file), *(x for s in sets or [] for x in ("--set", s)), "--out", str(folder)]
        again += ["--scale", scale] if scale else []
        again += [*(["--data", str(data)] if data else []), "--jobs", str(jobs)]
        interrupted("stopped, all whole rounds are saved", shlex.join(again))
    done = [cell.folder(folder) for cell in chosen if cell.done(folder)]
    if done and not quiet:
        out_console.print(comparison_table.as_table(comparison.compare(run_index.find_runs(done))))
        out_console.print(f"Run folders: {escape(str(folder))}", highlight=False)
    if failed := [cell.folder(folder) for cell in chosen if cell.failed(folder)]:
        raise RunFailed(
            f"{len(failed)} of {len(chosen)} runs came to nothing, the first in {failed[0]}: "
            f"its {sweeps.FAILED} says why, and while that file is there it is not tried again"
        )
