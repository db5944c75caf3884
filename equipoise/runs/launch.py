"""Start, resume and reopen runs of an experiment."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from equipoise.callbacks import Callback, Progress, with_trackers
from equipoise.callbacks.callback_list import CallbackList
from equipoise.config.experiment import Experiment
from equipoise.data.federation import Federation
from equipoise.data.finite import check_finite
from equipoise.data.sources import SOURCES, data_folder
from equipoise.distributed import environment
from equipoise.distributed.ranks import Ranks, current_ranks
from equipoise.engine.assembly import check_back, engine_device, experiment_task, run_in_folder, start_or_resume
from equipoise.engine.rescoring import rescore
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.executors.build import execution_mode
from equipoise.registry import short_name, use_folders
from equipoise.runs.result import Result
from equipoise.storage.run_folder import CALLBACKS, FOLDERS, WRITTEN, RunFolder, made_in_python, read_toml
from equipoise.torch_device import CPU
from equipoise.training.task import Task

_TRAINED = "trained"
"""Key in the run.toml of a run that reused the training of another run: the name of that run's folder."""


def default_folder(path: Path, experiment: Experiment, how: str = "") -> Path:
    """Return the run folder that is used if the user names none; `how` is appended to its name."""
    name = short_name(experiment.algorithm_name)
    return Path("runs") / f"{path.stem}-{name}-seed{experiment.schedule.seed}{how}"


def folder_of_data(file: Path, given: Path | None, warn: Callable[[str], None] = lambda text: None) -> Path | None:
    """Return the folder of data sets, or None for the default.

    Args:
        file: an experiment; a run.toml names the folder that its run used.
        given: the folder that the user named, which takes precedence.
        warn: called with a warning if the folder that a run.toml names does not exist.
    """
    if given is not None and not given.is_dir():
        raise EquipoiseError(f"--data {given} is not a folder")
    if given is not None or not file.exists():
        return given
    tables = read_toml(file)
    written = tables.get(WRITTEN)
    folder = written.get("data") if isinstance(written, dict) else None
    if not isinstance(folder, str):
        return None
    if not Path(folder).is_dir():
        if not _needs_files(tables):
            return None
        warn(f"the data of {file} were in {folder}, which does not exist; looking in {data_folder(None)}")
        return None
    return Path(folder)


def _needs_files(tables: Mapping[str, Any]) -> bool:
    """Tell whether the data set of a configuration is read from the data folder, and neither bundled nor drawn."""
    data = tables.get("data")
    source = SOURCES.get(str(data.get("name"))) if isinstance(data, Mapping) else None
    return source is not None and not (source.draws or source.bundled)


def run(
    experiment: Experiment,
    out: Path,
    data: Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    trained: Path | None = None,
    back: int = 0,
) -> Result:
    """Run an experiment.

    Args:
        experiment: what to run.
        out: the run folder.
        data: the folder of data sets, or None for the default.
        resume: whether to continue from the last checkpoint, if there is one.
        callbacks: are called besides those of the experiment, whose progress they show in their own way.
        trained: folder of a finished run with the same training. Its models are scored as this method uses them, and
            nothing is trained.
        back: 0 to continue from the newest checkpoint, N from the Nth before it.

    Returns:
        The finished run.
    """
    check_back(back, resume)
    with use_folders(experiment.folders):
        return _run(experiment, out, data, resume, callbacks, trained, back)


def _run(
    experiment: Experiment,
    out: Path,
    data: Path | None,
    resume: bool,
    callbacks: Sequence[Callback],
    trained: Path | None,
    back: int,
) -> Result:
    chosen = [each for each in experiment.callbacks if not (callbacks and isinstance(each, Progress))]
    given = CallbackList(callbacks)
    if experiment.engine.kind != "simulate":
        raise EquipoiseError(
            "engine.kind = 'flower' is a federation over real machines; start it with `equipoise deploy local` or "
            "`equipoise deploy init`, or simulate it with --set engine.kind=simulate"
        )
    if resume and data is None:
        data = folder_of_data(RunFolder(out).config, None, given.on_message)
    source = data_folder(data).resolve()
    ranks = current_ranks()
    if ranks.size > 1 and trained is not None:
        raise EquipoiseError("models of another run's training are scored in one process; leave out --processes")
    for turn in (True, False):  # the first process on a machine decodes the data, the others read its cache
        if turn == (environment.local_rank() == 0):
            federation = experiment.federation(source, given.on_data_progress)
        ranks.barrier()
    check_finite(federation)
    federation = federation.packed()
    for note in federation.notes:
        given.on_message(note)
    given.check()
    task = experiment_task(experiment, federation)
    written = {
        "data": str(source),
        "mode": execution_mode(experiment.engine, task),
        "device": str(task.device),
        **({"processes": ranks.size} if ranks.size > 1 else {}),
        FOLDERS: experiment.lookup_folders(),
    }
    if trained is not None:
        written[_TRAINED] = trained.name

    def build(folder: RunFolder, callbacks: CallbackList) -> Simulation:
        if trained is not None:
            shutil.copytree(RunFolder(trained).checkpoint, folder.checkpoint, dirs_exist_ok=True)
        return _simulation(experiment, federation, task, folder, callbacks, ranks)

    def execute(simulation: Simulation) -> None:
        if trained is not None:
            rescore(simulation, RunFolder(trained).read_metrics())
        else:
            start_or_resume(simulation, resume, back)

    return Result(
        run_in_folder(
            build,
            execute,
            out,
            experiment.tables(),
            resume=resume,
            callbacks=with_trackers([*callbacks, *chosen], experiment.schedule.track if ranks.leader else ()),
            ranks=ranks,
            **written,
        )
    )


def has_models(path: Path) -> bool:
    """Tell whether a finished run still has its last checkpoint."""
    return any(RunFolder(path).checkpoint.glob("round-*.json"))


def clear_if_half_scored(path: Path) -> None:
    """Delete an unfinished run that reused the training of another run, because it cannot be resumed."""
    folder = RunFolder(path)
    if folder.summary.exists() or not folder.config.exists():
        return
    if _TRAINED in read_toml(folder.config).get(WRITTEN, {}):
        shutil.rmtree(path)


def reopen(path: Path, data: Path | None = None) -> tuple[Result, Experiment]:
    """Load a run as it was at its newest checkpoint, and its experiment."""
    folder = RunFolder.open(path)
    tables = read_toml(folder.config)
    if made_in_python(tables):
        raise EquipoiseError(
            f"{path} was made from Python, so its module and its data are not known here; in Python, "
            f"equipoise.load_result({str(path)!r}, module=..., clients=...) loads it, and its method similarity() "
            "compares models as `equipoise cka` does"
        )
    tables.pop(CALLBACKS, None)  # nothing is run, so their code need not be there
    experiment = Experiment.parse(tables, needs=("algorithm",), folders=[path])
    if experiment.engine.kind != "simulate":
        raise EquipoiseError(
            f"{path} is the server's folder of a deployment: personal models are on the clients' machines, in "
            "personal.safetensors of their state folders, and the global model is in its global.safetensors"
        )
    federation = experiment.federation(data_folder(folder_of_data(folder.config, data)))
    with use_folders(experiment.folders):
        task = experiment_task(experiment, federation, _device_here(experiment))
    simulation = _simulation(experiment, federation, task, folder)
    simulation.close()
    if not simulation.restore():
        raise EquipoiseError(f"{path} has no checkpoint yet; continue the run with --resume")
    return Result(simulation), experiment


def _device_here(experiment: Experiment) -> torch.device:
    """Return the device of a finished run; the CPU if it is not there, as the run may come from another machine."""
    try:
        return engine_device(experiment.engine)
    except EquipoiseError:
        return CPU


def _simulation(
    experiment: Experiment,
    federation: Federation,
    task: Task,
    folder: RunFolder,
    callbacks: CallbackList | None = None,
    ranks: Ranks | None = None,
) -> Simulation:
    settings = (experiment.algorithm, experiment.schedule, experiment.engine)
    return Simulation(task, federation, *settings, folder, callbacks, experiment.uploads, experiment.devices, ranks)
