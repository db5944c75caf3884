"""The command `equipoise run`."""

import shlex
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from equipoise.callbacks.base import Callback
from equipoise.cli.console import Back, Data, Out, Sets, interrupted, out_console, progress_bar, show_run
from equipoise.errors import EquipoiseError, Interrupted


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Experiment.")],
    sets: Sets = None,
    out: Out = None,
    data: Data = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint, if there is one.")] = False,
    back: Back = 0,
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", min=1, help="Number of processes that share the clients.")
    ] = 1,
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
        equipoise run small.toml --resume --back 1
        equipoise run small.toml --processes 4

    Results do not depend on the number of processes. On several machines with a common folder, start it with torchrun:
    `torchrun --nnodes 2 --nproc-per-node 4 ... -m equipoise run small.toml --out DIR`.

    All other settings have defaults; `equipoise list algorithms` shows the algorithms. The output folder (default:
    runs/FILE-ALGORITHM-seedN) gets run.toml with all settings, metrics.jsonl with one line per round, timings.jsonl,
    clients.csv, summary.json and checkpoint/.
    """
    from equipoise.config.experiment import Experiment
    from equipoise.distributed import environment
    from equipoise.engine.assembly import check_back
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
    if processes > 1:
        _run_in_processes(processes, file, sets, folder, data, resume, back, quiet)
    check_back(back, resume)
    resume = resume or environment.restarts() > 0
    if environment.rank() > 0:  # the first process reports
        with suppress(Interrupted):
            launch.run(experiment, folder, launch.folder_of_data(file, data), resume, [Callback()], back=back)
            return
        raise SystemExit(130)
    progress = None if quiet else progress_bar()
    bar = show_run(progress, experiment.algorithm_name)
    source = launch.folder_of_data(file, data, bar.on_message)
    try:
        with nullcontext() if progress is None else progress:
            launch.run(experiment, folder, source, resume, [bar], back=back)
    except Interrupted:
        again = ["equipoise", *_arguments(file, sets, folder, data), "--resume"]
        again += ["--processes", str(environment.world_size())] if environment.world_size() > 1 else []
        interrupted(f"stopped after round {bar.done}, all rounds are saved", shlex.join(again))
    if not quiet:
        found = run_index.find_runs([folder])
        rows, others = comparison.compare(found), comparison.other_metrics(found)
        out_console.print(comparison_table.as_table(rows))
        if others:
            out_console.print(comparison_table.metrics_table(rows, others))
        out_console.print(f"Run folder: {escape(str(folder))}", highlight=False)


def _arguments(file: Path, sets: list[str] | None, folder: Path, data: Path | None) -> list[str]:
    changes = [word for change in sets or [] for word in ("--set", change)]
    return ["run", str(file), *changes, "--out", str(folder), *(["--data", str(data)] if data else [])]


def _run_in_processes(
    count: int,
    file: Path,
    sets: list[str] | None,
    folder: Path,
    data: Path | None,
    resume: bool,
    back: int,
    quiet: bool,
) -> NoReturn:
    """Run in several processes on this machine, and exit as the first one does."""
    from equipoise.distributed import environment
    from equipoise.distributed.shards import MOST
    from equipoise.engine.assembly import check_back
    from equipoise.runs.local_processes import run_processes

    if environment.world_size() > 1:
        raise EquipoiseError("torchrun starts the processes of this run; leave out --processes")
    if count > MOST:
        raise EquipoiseError(f"--processes {count} is more than the {MOST} shards that clients are divided into")
    check_back(back, resume)
    options = [
        *(["--resume"] if resume else []),
        *(["--back", str(back)] if back else []),
        *(["--quiet"] if quiet else []),
    ]
    raise SystemExit(run_processes([*_arguments(file, sets, folder, data), *options], count))
