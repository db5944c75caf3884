"""Starting, resuming and reopening runs of an experiment."""

from pathlib import Path
from typing import Any

from equipoise import files
from equipoise.api import Result
from equipoise.config import Experiment, read_toml
from equipoise.data.sources import data_folder
from equipoise.engine.simulate import Simulation
from equipoise.errors import EquipoiseError
from equipoise.runfolder import RunFolder
from equipoise.watcher import Watcher

# What may change between a run and its continuation, because results do not depend on it up to that round.
_MAY_CHANGE = {"rounds", "checkpoint_every", "engine.workers", "engine.memory_mb"}


def flatten(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def default_folder(path: Path, experiment: Experiment) -> Path:
    return Path("runs") / f"{path.stem}-{experiment.algorithm_name}-seed{experiment.schedule.seed}"


def run(
    experiment: Experiment, out: Path, data: Path | None = None, resume: bool = False, watcher: Watcher | None = None
) -> Result:
    """A run of the experiment in the folder `out`, from its start or from where it was."""
    source = data_folder(data).resolve()
    exists = (out / "run.toml").exists()
    if resume and exists:
        folder = RunFolder.open(out)
        _same(Experiment.parse(read_toml(folder.config)), experiment, out)
    federation = experiment.federation(source)
    task = experiment.task(federation)
    config = experiment.to_toml(
        data=str(source), mode=task.mode() if experiment.engine.mode == "auto" else experiment.engine.mode
    )
    if resume and exists:
        files.write_text(folder.config, config)
    else:
        folder = RunFolder.create(out, config)
    with folder.locked():
        simulation = Simulation(
            task,
            federation,
            experiment.algorithm,
            experiment.schedule,
            experiment.engine,
            folder,
            watcher,
            experiment.data.name,
        )
        if resume:
            simulation.resume()
        simulation.run()
    return Result(simulation)


def _same(before: Experiment, now: Experiment, out: Path) -> None:
    old, new = flatten(before.tables()), flatten(now.tables())
    for key in sorted(old.keys() | new.keys()):
        if key not in _MAY_CHANGE and old.get(key) != new.get(key):
            raise EquipoiseError(
                f"the run in {out} had {key} = {old.get(key)!r}, not {new.get(key)!r}; "
                "resume it with the same settings, or choose another --out"
            )


def reopen(path: Path, data: Path | None = None) -> tuple[Result, Experiment]:
    """A run as it stood at its newest checkpoint."""
    folder = RunFolder.open(path)
    tables = read_toml(folder.config)
    experiment = Experiment.parse(tables)
    federation = experiment.federation(data_folder(data or Path(tables["written"]["data"])))
    task = experiment.task(federation)
    simulation = Simulation(task, federation, experiment.algorithm, experiment.schedule, experiment.engine, folder)
    simulation.close()
    if not simulation.restore():
        raise EquipoiseError(f"{path} has no checkpoint yet; let the run go on with --resume")
    return Result(simulation), experiment
