"""The command `equipoise sweep`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import Data, Sets, err_console, interrupted, out_console, progress_bar
from equipoise.errors import Interrupted, RunFailed


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Experiment with lists of values.")],
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of all run folders.")] = None,
    data: Data = None,
    scale: Annotated[
        str | None,
        typer.Option("--scale", metavar="NAME", help="Section [scale.NAME] to apply; default: small, if any."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=256, help="Number of runs at a time.")] = 1,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="PART/PARTS", help="Run one part of the sweep, such as 2/8."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide the progress bar and the table.")] = False,
) -> None:
    """Run all combinations of the values that an experiment lists.

    \b
        equipoise sweep sweep.toml --jobs 2
        equipoise sweep sweep.toml --scale smoke

    \b
    Five seeds, two partitions and three values of lam: 30 runs.
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
    Settings that belong together go into a variant.
    Methods with the same training train only once (here fedavg-ft and knn-per).
        [[variant]]
        algorithm = { name = "fedeq" }
        model = { name = "deq-mlp" }
        [[variant]]
        algorithm = [{ name = "fedavg-ft" }, { name = "knn-per" }]
        model = { name = "mlp" }
        [scale.smoke]
        rounds = 2

    With `sweep.tune`, the best value is chosen on validation samples with the first seed, and the other seeds use only
    that value: 14 runs in place of 30. `equipoise compare` then shows the chosen runs. The same command resumes a
    stopped sweep; finished runs are not repeated.

    Machines with a common folder share a sweep with `--shard`: the first runs `--shard 1/8`, the second `--shard 2/8`.
    All candidates of one choice are in the same part.
    """
    from equipoise.reporting import comparison, comparison_table
    from equipoise.runs import process_pool as processes
    from equipoise.runs import sweep as sweeps
    from equipoise.runs.sweep_parts import SweepPart
    from equipoise.storage import run_index
    from equipoise.storage.run_folder import FAILED, read_toml

    part = SweepPart.parse(shard) if shard is not None else None
    whole, settings = sweeps.expand_sweep(read_toml(file), scale, sets or [], folders=[file.resolve().parent])
    every, first = part.select(whole, settings.tune) if part else whole, whole[0].seed
    folder = out or Path("runs") / file.stem
    progress = progress_bar("runs")
    progress.disable = quiet

    def report(cell: sweeps.SweepRun, notes: list[str]) -> None:
        progress.advance(bar)
        for note in notes:
            err_console.print(f"equipoise: {escape(note)}", highlight=False)

    def execute(wanted: list[sweeps.SweepRun], what: str = "") -> None:
        there = sum(cell.done(folder) or cell.failed(folder) for cell in wanted)
        progress.reset(bar, total=len(wanted), completed=there, score=what)
        processes.execute(wanted, folder, data, jobs, report)

    try:
        with progress:
            bar = progress.add_task(file.stem, total=None, score="")
            execute(sweeps.tuned(every, settings, folder, first)[0], "(tuning)")
            sweeps.record_tuning(every, settings, folder, first)
            chosen = sweeps.tuned(every, settings, folder, first)[1]
            execute(chosen)
    except (Interrupted, KeyboardInterrupt):
        again = ["equipoise", "sweep", str(file), *(x for s in sets or [] for x in ("--set", s)), "--out", str(folder)]
        again += ["--scale", scale] if scale else []
        again += [*(["--data", str(data)] if data else []), "--jobs", str(jobs)]
        again += ["--shard", shard] if shard else []
        interrupted("stopped, all complete rounds are saved", shlex.join(again))
    done = [cell.folder(folder) for cell in chosen if cell.done(folder)]
    if done and not quiet:
        out_console.print(comparison_table.as_table(comparison.compare(run_index.find_runs(done))))
        out_console.print(f"Run folders: {escape(str(folder))}", highlight=False)
    if part and not quiet:
        runs = f"has ended; it has {len(every)} of all {len(whole)} combinations" if every else "has no runs"
        then = shlex.join(["equipoise", "compare", str(folder)])
        text = f"Part {part.number} of {part.of} {runs}. When the other parts have ended too, compare all with: {then}"
        out_console.print(escape(text), highlight=False, soft_wrap=True)
    if failed := [cell.folder(folder) for cell in chosen if cell.failed(folder)]:
        raise RunFailed(
            f"{len(failed)} of {len(chosen)} runs failed, the first in {failed[0]}; "
            f"its {FAILED} has the reason; delete that file to run it again"
        )
