"""The command `equipoise run`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import Data, Out, Sets, interrupted, out_console, progress_bar, show_run
from equipoise.errors import EquipoiseError, Interrupted


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Experiment.")],
    sets: Sets = None,
    out: Out = None,
    data: Data = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint, if there is one.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide the progress bar and the table.")] = False,
) -> None:
    """Run an experiment.

    \b
    An example, small.toml, which needs no download:
        rounds = 20
        [data]
        name = "digits-by-writer"
        [model]
        name = "mlp"
        [algorithm]
        name = "ditto"

    \b
        equipoise run small.toml
        equipoise run small.toml --set algorithm.lam=1.0 --out runs/lam1
        equipoise run small.toml --resume

    All other settings have defaults; `equipoise list algorithms` shows the algorithms. The output folder (default:
    runs/FILE-ALGORITHM-seedN) gets run.toml with all settings, metrics.jsonl with one line per round, timings.jsonl,
    clients.csv, summary.json and checkpoint/.
    """
    from equipoise.config.experiment import Experiment
    from equipoise.reporting import comparison, comparison_table
    from equipoise.runs import launch
    from equipoise.storage import run_index

    if (file / "run.toml").is_file():
        Experiment.load(file / "run.toml")  # says so if the run was made from Python
        toml = shlex.quote(str(file / "run.toml"))
        raise EquipoiseError(
            f"{file} is the folder of a run; resume it with `equipoise run {toml} --out {shlex.quote(str(file))} "
            f"--resume`, or run its settings again with `equipoise run {toml} --out DIR`"
        )
    experiment = Experiment.load(file, sets or [])
    folder = out or launch.default_folder(file, experiment)
    progress = None if quiet else progress_bar()
    bar = show_run(progress, experiment.algorithm_name)
    source = launch.folder_of_data(file, data, bar.on_message)
    try:
        if progress is None:
            launch.run(experiment, folder, source, resume, [bar])
        else:
            with progress:
                launch.run(experiment, folder, source, resume, [bar])
    except Interrupted:
        again = ["equipoise", "run", str(file), *(x for s in sets or [] for x in ("--set", s)), "--out", str(folder)]
        again += ["--data", str(data)] if data else []
        interrupted(f"stopped after round {bar.done}, all rounds are saved", shlex.join([*again, "--resume"]))
    if not quiet:
        found = run_index.find_runs([folder])
        rows, others = comparison.compare(found), comparison.other_metrics(found)
        out_console.print(comparison_table.as_table(rows))
        if others:
            out_console.print(comparison_table.metrics_table(rows, others))
        out_console.print(f"Run folder: {escape(str(folder))}", highlight=False)
