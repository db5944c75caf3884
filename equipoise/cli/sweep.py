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
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="FILE.jsonl", help="Add finished runs to this file; skip those in it."),
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

    With `tune_rounds = 30` and `tune_seed = 100` in [sweep], trials are runs of their own, with at most 30 rounds and a
    seed that is not reported.

    Machines with a common folder share a sweep with `--shard`: the first runs `--shard 1/8`, the second `--shard 2/8`.
    All candidates of one choice are in the same part.

    With `--record FILE.jsonl` every finished run is added to a small file. With a copy of it the sweep continues on
    another machine, which needs no run folders: runs in the file are not repeated, and tables include them.
    """
    from equipoise.reporting import comparison, comparison_table
    from equipoise.runs import process_pool as processes
    from equipoise.runs import sweep as sweeps
    from equipoise.runs import tuning
    from equipoise.runs.recorded_runs import RecordedRuns
    from equipoise.runs.sweep_parts import SweepPart
    from equipoise.runs.sweep_recorder import SweepRecorder
    from equipoise.runs.sweep_results import SweepResults
    from equipoise.storage.result_records import prepare_records_file
    from equipoise.storage.run_folder import FAILED, read_toml

    if record is not None:
        prepare_records_file(record)
    part = SweepPart.parse(shard) if shard is not None else None
    whole, settings = sweeps.expand_sweep(read_toml(file), scale, sets or [], folders=[file.resolve().parent])
    every, first = part.select(whole, settings.together) if part else whole, whole[0].seed
    folder = out or Path("runs") / file.stem
    results = SweepResults(folder, RecordedRuns.read([record] if record else []))
    recorder = SweepRecorder(record, results, scale or sweeps.default_scale(read_toml(file))) if record else None
    progress = progress_bar("runs")
    progress.disable = quiet

    said: set[str] = set()

    def execute(wanted: list[sweeps.SweepRun], trial: bool) -> None:
        def report(cell: sweeps.SweepRun, notes: list[str]) -> None:
            progress.advance(bar)
            for note in processes.unsaid(notes, said):
                err_console.print(f"equipoise: {escape(note)}", highlight=False)
            if recorder is not None:
                recorder.add([cell], trial)

        there = sum(results.done(cell) or results.failed(cell) for cell in wanted)
        progress.reset(bar, total=len(wanted), completed=there, score="(tuning)" if trial else "")
        left = results.to_run(wanted)
        if taken := [cell for cell in wanted if cell not in left]:
            what = "trials" if trial else "runs"
            by = ", ".join(results.versions(taken))
            text = f"{len(taken)} of {len(wanted)} {what} are in {record} (made by version {by}) and are not repeated"
            err_console.print(f"equipoise: {escape(text)}", highlight=False, soft_wrap=True)
        processes.execute(left, folder, data, jobs, report)
        if recorder is not None:
            recorder.add(wanted, trial)

    try:
        with progress:
            bar = progress.add_task(file.stem, total=None, score="")
            trials = tuning.trials_of(every, settings, first)
            execute(trials, trial=True)
            tuning.record_tuning(every, settings, results, first)
            chosen = tuning.tuned(every, settings, results, first)[1]
            if recorder is not None:
                recorder.mark([*trials, *every], chosen)
            execute(chosen, trial=False)
    except (Interrupted, KeyboardInterrupt):
        again = ["equipoise", "sweep", str(file), *(x for s in sets or [] for x in ("--set", s)), "--out", str(folder)]
        again += ["--scale", scale] if scale else []
        again += [*(["--data", str(data)] if data else []), "--jobs", str(jobs)]
        again += [*(["--shard", shard] if shard else []), *(["--record", str(record)] if record else [])]
        interrupted("stopped, all complete rounds are saved", shlex.join(again))
    done = results.runs(chosen)
    if done and not quiet:
        for choice in tuning.find_choices(every, settings, results, first):
            out_console.print(escape(f"Tuned {choice.sentence()}"), highlight=False, soft_wrap=True)
        out_console.print(comparison_table.as_table(comparison.compare(done)))
        out_console.print(f"Run folders: {escape(str(folder))}", highlight=False)
    if part and not quiet:
        runs = f"has ended; it has {len(every)} of all {len(whole)} combinations" if every else "has no runs"
        then = shlex.join(["equipoise", "compare", str(folder)])
        text = f"Part {part.number} of {part.of} {runs}. When the other parts have ended too, compare all with: {then}"
        out_console.print(escape(text), highlight=False, soft_wrap=True)
    if failed := [cell for cell in chosen if results.failed(cell)]:
        where = results.path(failed[0])
        advice = (
            f"remove its line from {record} to run it again"
            if results.record(failed[0])
            else f"its {FAILED} has the reason; delete that file to run it again"
        )
        raise RunFailed(f"{len(failed)} of {len(chosen)} runs failed, the first in {where}; {advice}")
