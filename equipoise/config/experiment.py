"""Experiments as TOML: read with strict checks, written with every default."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.attacks import ATTACKS, Attack
from equipoise.callbacks import CALLBACKS, Callback
from equipoise.config.deployment import Deploy
from equipoise.config.device_classes import Devices
from equipoise.config.engine import Engine, Schedule
from equipoise.config.suggestions import suggest_setting
from equipoise.config.uploads import UploadSettings
from equipoise.data.config import DataSection
from equipoise.data.federation import Federation
from equipoise.data.source import DataProgress
from equipoise.errors import EquipoiseError
from equipoise.metrics import find_metrics
from equipoise.models import MODELS
from equipoise.models.base import ModelSettings
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import REDUCERS, Reducer
from equipoise.registry import choose, use_folders
from equipoise.settings import read, shown
from equipoise.storage.run_folder import FOLDERS, WRITTEN, made_in_python, read_toml

_SECTIONS = ("data", "model", "algorithm", "attack", "reducer", "privacy", "devices", "engine", "deploy")
_CALLBACKS = "callbacks"
_NEEDED = ("data", "model", "algorithm")
_NAMED = (*_NEEDED, "attack", "reducer")
_REDUCER = "weighted-mean"


@dataclass(frozen=True)
class Experiment:
    """All settings of one run, checked."""

    schedule: Schedule
    data: DataSection | None
    "section [data]; None if every client has its own data"
    model_name: str
    model: ModelSettings | None
    "section [model]; None if the user gives a model in Python"
    algorithm_name: str
    algorithm: Algorithm
    engine: Engine
    deploy: Deploy
    attack_name: str = ""
    attack: Attack | None = None
    reducer_name: str = _REDUCER
    reducer: Reducer = field(default_factory=REDUCERS[_REDUCER])
    privacy: Privacy | None = None
    devices: Devices | None = None
    folders: tuple[Path, ...] = field(default=(), compare=False)
    "folders in which own code and relative paths are looked up, before the current one"
    callback_names: tuple[str, ...] = ()
    callbacks: tuple[Callback, ...] = ()
    "tables [[callbacks]]"

    @staticmethod
    def parse(tables: Mapping[str, Any], needs: Sequence[str] = _NEEDED, folders: Sequence[Path] = ()) -> "Experiment":
        """Check the tables of a configuration.

        Args:
            tables: the content of the file.
            needs: the sections that must be there, fewer for a deployment.
            folders: where own code and relative paths are looked up, after the folders that a run.toml names and before
                the current one.
        """
        folders = recorded_folders(tables, folders)
        with use_folders(folders):
            return replace(Experiment._parse(tables, needs), folders=folders)

    @staticmethod
    def _parse(tables: Mapping[str, Any], needs: Sequence[str]) -> "Experiment":
        tables = {k: v for k, v in tables.items() if k != WRITTEN}
        if made_in_python(tables):
            raise EquipoiseError(
                "the file describes a run that was made from Python with equipoise.train, so it cannot name the module "
                "and the data; run your script again, or load the models with equipoise.load_result"
            )
        for key, value in tables.items():
            if key in ("sweep", "variant", "scale") or (key in _SECTIONS and isinstance(value, list)):
                raise EquipoiseError(f"the file describes many runs ([{key}]); start them with `equipoise sweep`")
            known = [*_SECTIONS, _CALLBACKS, *Schedule.model_fields]
            if key not in known:
                what = "section" if isinstance(value, dict) else "setting"
                raise EquipoiseError(f"unknown {what} {key}{suggest_setting(key, tables, known)}")
            if key in _SECTIONS and not isinstance(value, dict):
                meant = (
                    f"; did you mean {key}.name = {shown(value)}?" if isinstance(value, str) and key in _NAMED else ""
                )
                raise EquipoiseError(f"{key} = {shown(value)} is not allowed; it must be a section, [{key}]{meant}")
        for section in needs:
            if section not in tables:
                raise EquipoiseError(f"the section [{section}] is missing")
        schedule = read(Schedule, {k: v for k, v in tables.items() if k not in (*_SECTIONS, _CALLBACKS)}, "")
        find_metrics(schedule.metrics or ())  # an unknown name is an error before any data are loaded
        data = DataSection.parse(tables["data"]) if "data" in tables else None
        model_name, model = choose(MODELS, dict(tables["model"]), "model") if "model" in tables else ("", None)
        algorithm_name, algorithm = choose(ALGORITHMS, dict(tables["algorithm"]), "algorithm")
        privacy = read(Privacy, tables["privacy"], "privacy") if "privacy" in tables else None
        devices = read(Devices, tables["devices"], "devices") if "devices" in tables else None
        engine = read(Engine, tables.get("engine", {}), "engine")
        deploy = read(Deploy, tables.get("deploy", {}), "deploy")
        attack_name, attack = choose(ATTACKS, dict(tables["attack"]), "attack") if "attack" in tables else ("", None)
        reducer_name, reducer = choose(REDUCERS, dict(tables.get("reducer", {"name": _REDUCER})), "reducer")
        callbacks = read_callbacks(tables.get(_CALLBACKS, []))
        return Experiment(
            schedule=schedule,
            data=data,
            model_name=model_name,
            model=model,
            algorithm_name=algorithm_name,
            algorithm=algorithm,
            attack_name=attack_name,
            attack=attack,
            reducer_name=reducer_name,
            reducer=reducer,
            privacy=privacy,
            devices=devices,
            engine=engine,
            deploy=deploy,
            callback_names=tuple(name for name, _ in callbacks),
            callbacks=tuple(callback for _, callback in callbacks),
        )

    @staticmethod
    def load(path: Path, sets: Sequence[str] = (), needs: Sequence[str] = _NEEDED) -> "Experiment":
        """Read a configuration file.

        Args:
            path: the TOML file.
            sets: changes as `section.key=value`.
            needs: the sections that must be there.
        """
        return Experiment.parse(override(read_toml(path), sets), needs, [path.resolve().parent])

    @property
    def head(self) -> str | tuple[str, ...]:
        """Return the names of the parameters that form the model's head."""
        return "head" if self.model is None or self.model.head is None else self.model.head

    @property
    def uploads(self) -> UploadSettings:
        """Return what happens to uploads."""
        return UploadSettings(self.attack, self.reducer, self.privacy)

    def deployed(self) -> "Experiment":
        """Return the experiment with the engine of deployments."""
        return replace(self, engine=self.engine.model_copy(update={"kind": "flower"}))

    def tables(self) -> dict[str, Any]:
        """Return the whole configuration, with every default."""
        return {
            **self.schedule.table(),
            **({"data": self.data.table()} if self.data else {}),
            **({"model": {"name": self.model_name, **self.model.table()}} if self.model else {}),
            "algorithm": {"name": self.algorithm_name, **self.algorithm.table()},
            **({"attack": {"name": self.attack_name, **self.attack.table()}} if self.attack else {}),
            "reducer": {"name": self.reducer_name, **self.reducer.table()},
            **({"privacy": self.privacy.table()} if self.privacy else {}),
            **({"devices": self.devices.table()} if self.devices else {}),
            **callback_tables(self.callback_names, self.callbacks),
            "engine": self.engine.table(),
            **({"deploy": self.deploy.table()} if self.engine.kind == "flower" else {}),
        }

    def federation(self, folder: Path, progress: DataProgress = lambda done, total: None) -> Federation:
        """Load the data, and return the federation."""
        if self.data is None:
            raise EquipoiseError("the section [data] is missing")
        return self.data.federation(folder, self.schedule.seed, progress, self.folders)

    def lookup_folders(self) -> list[str]:
        """Return the folders for the section [written] of run.toml, so that it can be used from anywhere."""
        return list(dict.fromkeys(map(str, (*self.folders, Path.cwd()))))


def recorded_folders(tables: Mapping[str, Any], folders: Sequence[Path] = ()) -> tuple[Path, ...]:
    """Return the folders in which a run looked for own code and relative paths, followed by the given ones.

    Args:
        tables: the content of a configuration; that of a run.toml names folders.
        folders: other folders.
    """
    written = tables.get(WRITTEN)
    named = written.get(FOLDERS) if isinstance(written, Mapping) else None
    recorded = [Path(text) for text in named if isinstance(text, str)] if isinstance(named, list) else []
    try:
        return tuple(dict.fromkeys(folder.resolve() for folder in (*recorded, *folders)))
    except ValueError as error:  # a null byte in a name
        raise EquipoiseError(f"{WRITTEN}.{FOLDERS} cannot be the names of folders: {error}") from None


def read_callbacks(tables: Any) -> list[tuple[str, Callback]]:
    """Read the tables [[callbacks]]; return names and callbacks."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise EquipoiseError(
            f"{_CALLBACKS} = {shown(tables)} is not allowed; it must be a list of tables with a name, [[{_CALLBACKS}]]"
        )
    found = [choose(CALLBACKS, table, _CALLBACKS) for table in tables]
    for name, callback in found:
        if type(callback).__init__ is not Callback.__init__:
            raise EquipoiseError(
                f"{_CALLBACKS}.name = {name!r} has an __init__ of its own, so a file cannot give its settings; "
                "make them annotated attributes of the class, and set up its state in on_run_begin"
            )
    return found


def callback_tables(names: Sequence[str], callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the tables [[callbacks]] of a configuration; nothing if there are none."""
    tables = [{"name": name, **callback.table()} for name, callback in zip(names, callbacks, strict=True)]
    return {_CALLBACKS: tables} if tables else {}


def override(tables: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """Apply changes written as `section.key=value` to the tables, and return them.

    Values are written as in TOML; quotes around words may be left out.
    """
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals or not key.strip() or key.strip().split(".")[0] == WRITTEN:
            raise EquipoiseError(
                f"--set {shown(item)[1:-1]} is not allowed; it must be section.key=value, such as algorithm.lr=0.1"
            )
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except RecursionError:
            raise EquipoiseError(f"--set {key.strip()} is not allowed; its value is nested too deeply") from None
        except ValueError:  # not TOML, or a number of thousands of digits
            value = text.strip()
        *path, last = key.strip().split(".")
        at = [tables]
        for step in path:
            found = [table.setdefault(step, {}) for table in at]
            # If a section is there several times ([[algorithm]] in a sweep), all of them are changed.
            at = [table for each in found for table in (each if isinstance(each, list) else [each])]
            if not all(isinstance(table, dict) for table in at):
                raise EquipoiseError(
                    f"--set {shown(item)[1:-1]} is not allowed; {shown(step)[1:-1]} is a setting, not a section"
                )
        for table in at:
            table[last] = value
    return tables
