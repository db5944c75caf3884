"""The folder of a run: its configuration, its results, and the checkpoint that it can resume from."""

import csv
import difflib
import fcntl
import json
import os
import platform
import re
import shutil
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np
import tomli_w

from equipoise.errors import EquipoiseError, ProcessLost, RunFailed, first_line
from equipoise.storage import atomic_files
from equipoise.storage.log_prefix import LogPrefix, find_change

WRITTEN = "written"
"""The section that a run adds to its configuration for information; it is not a setting."""

PROBLEM = "problem"
"""Key in that section: a digest of the data of a run from Python that is the same for all seeds."""

FAILED = "failed.json"
"""File in the folder of a failed run of a sweep, with the reason; the run is not repeated while this file exists."""


FOLDERS = "folders"
"""Key of that section: the folders in which own code and relative paths were looked up."""

FORECASTS = "forecast.csv"
"""File of the scores of forecasts, one row per client and model."""

SHOWN = "shown.safetensors"
"""File of what an algorithm shows of its clients' states."""

MODELS = "models.safetensors"
"""File of every client's model, the global model and the server's state, written by `equipoise.train`."""

FEDERATION = "federation.json"
"""File of the number of samples of each client and label."""

CKA = "cka.json"
"""File of the results of `equipoise cka`."""

AUDIT = "audit.json"
"""File of the results of `equipoise audit`."""

DEPLOYMENT = "deployment"
"""Folder of the keys, clients and logs of a deployment on one machine."""

_DEEPEST = 32  # tables and lists within each other
_LONGEST_KEY = 256
_LINE_BREAKS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_RENAMED = {"engine.dtype": "engine.precision"}
CALLBACKS = "callbacks"
"""The list of tables [[callbacks]] in a configuration."""

ONLY_WATCH = ("progress", "checkpoints", "tensorboard", "mlflow", "wandb")
"""Names of the callbacks that do not affect results."""

_WATCHING = tuple(f"{CALLBACKS}.{name}." for name in ONLY_WATCH)
ASIDE = (
    "checkpoint_every",
    "keep_checkpoints",
    "track",
    "engine.workers",
    "engine.memory_mb",
    "engine.device",
    "engine.data",
    "engine.deterministic",
    *_WATCHING,
)
"""Settings that do not affect results, apart from rounding on different devices; or how their names begin."""
_MAY_CHANGE = {"rounds", *ASIDE}  # when a run is resumed
_FROM_PYTHON = {"model.parameters", "model.layout", "data.clients", "data.samples"}  # explained by the checkpoint
_TRIES = 8


def _lock(file: IO[str], kind: int, wait: float = 0.05) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        time.sleep(wait)
        return False
    return True


def flatten(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables into one, with dotted names; a callback's begin with `callbacks.NAME`."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if key == CALLBACKS and not prefix and isinstance(value, list):
            value = _by_name(value)
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a run.toml with dotted names; those that an older version named otherwise, as of today."""
    return current_names(flatten(read_toml(path)))


def current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the names of today, where an older version named them otherwise."""
    return {_RENAMED.get(key, key): value for key, value in settings.items()}


def made_in_python(tables: Mapping[str, Any]) -> bool:
    """Tell whether a run.toml is that of `equipoise.train`, which cannot name the user's module and data."""
    model = tables.get("model")
    return isinstance(model, dict) and "layout" in model


def _by_name(callbacks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tables of callbacks by name; the second of a name gets a number."""
    found: dict[str, Any] = {}
    for table in callbacks:
        name = number = str(table.get("name"))
        while number in found:
            number = f"{name} {len(found) + 1}"
        found[number] = table
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        return _checked(path, tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        close = difflib.get_close_matches(path.name, sorted(other.name for other in path.parent.glob("*.toml")), n=1)
        meant = f"; did you mean {path.with_name(close[0])}?" if close else ""
        raise EquipoiseError(f"there is no file {path}{meant}") from None
    except IsADirectoryError:
        inside = f", such as {path / 'run.toml'}" if (path / "run.toml").is_file() else ""
        raise EquipoiseError(f"{path} is a folder; name a TOML file{inside}") from None
    except OSError as error:
        raise EquipoiseError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise EquipoiseError(f"{path} cannot be read: it is not a text file in UTF-8 ({error})") from None
    except RecursionError:
        raise EquipoiseError(f"{path} is not valid: its tables or lists are nested too deeply") from None
    except ValueError as error:  # also a number of thousands of digits, which is no error of TOML
        raise EquipoiseError(f"{path} is not valid TOML: {first_line(error)}") from None


def _checked(path: Path, tables: dict[str, Any]) -> dict[str, Any]:
    """Return tables that error messages can speak of: not nested without end, and with keys of one line."""
    level: list[Any] = [tables]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for value in level:
            for key in value if isinstance(value, dict) else ():
                if _LINE_BREAKS.search(key) or len(key) > _LONGEST_KEY:
                    raise EquipoiseError(f"{path} has the key {key[:40]!r}, which is not one short line of text")
            found = value.values() if isinstance(value, dict) else value
            below += [each for each in found if isinstance(each, (dict, list))]
        if not below:
            return tables
        level = below
    raise RecursionError


class RunFolder:
    """The folder of a run, with the paths of its files."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics, self.timings = path / "metrics.jsonl", path / "timings.jsonl"
        self.logs = (self.metrics, self.timings)
        self.events = path / "events.jsonl"
        "log of what an operator should know about a deployment"
        self.checkpoint, self.summary = path / "checkpoint", path / "summary.json"
        self.config = path / "run.toml"
        self.models = path / MODELS
        self.forecasts = path / FORECASTS
        self.shown = path / SHOWN
        "what the algorithm shows of the clients that trained, one row per client in the order of clients.csv"
        self.text = ""
        "content of run.toml"
        self.new = False
        "whether it had no run before this one"
        self.prefixes = {log: LogPrefix(log) for log in self.logs}
        "what was read of the logs for their digests"

    @staticmethod
    @contextmanager
    def at_work(path: Path, settings: dict[str, Any], resume: bool, **written: Any) -> Iterator["RunFolder"]:
        """Open and lock the folder of a new run, or of a run with the same settings that is resumed.

        Args:
            path: the folder.
            settings: all settings of the run.
            resume: whether the folder may already hold a run.
            **written: more facts for the section [written] of run.toml.
        """
        atomic_files.make_folder(path)
        folder = RunFolder(path)
        made_by = {"equipoise": version("equipoise"), "torch": version("torch"), "python": platform.python_version()}
        written = {**made_by, **written}
        folder.text = tomli_w.dumps({**settings, WRITTEN: written})
        with folder.locked():
            new = folder.new = folder.admit(settings, resume)
            if new:
                folder.write_config()
            try:
                yield folder
            except EquipoiseError as error:
                if isinstance(error, RunFailed) and not isinstance(error, ProcessLost):
                    raise
                if new and not folder.metrics.exists():  # it never began: users need not clean up after a typo
                    folder.config.unlink(missing_ok=True)
                    folder.events.unlink(missing_ok=True)
                    shutil.rmtree(folder.checkpoint, ignore_errors=True)
                raise

    def admit(self, settings: dict[str, Any], resume: bool) -> bool:
        """Tell whether a run with these settings would be new here; raise an error if it must not use the folder."""
        if not self.config.exists():
            others = list(self.path.iterdir()) if self.path.exists() else []
            if not all(p.name in ("lock", DEPLOYMENT) or p.name.endswith(".part") for p in others):
                raise EquipoiseError(f"{self.path} is not empty and not a run; choose another --out")
            return True
        if not resume:
            raise EquipoiseError(
                f"{self.path} already holds a run; add --resume (resume=True in Python) to continue it, or choose "
                "another --out"
            )
        self._compare(settings)
        return False

    def _compare(self, settings: dict[str, Any]) -> None:
        """Raise an error if these are not the settings of the run in the folder."""
        old, new = read_settings(self.config), flatten(settings)
        older = old.get(f"{WRITTEN}.equipoise") != version("equipoise")
        saved = read_toml(self.config)
        passed = _MAY_CHANGE | (_FROM_PYTHON if made_in_python(saved) and made_in_python(settings) else set())
        for key in sorted(old.keys() | new.keys()):
            if key in passed or key.startswith((f"{WRITTEN}.", *_WATCHING)):
                continue
            if older and key not in old:  # a setting that did not exist when the run began
                continue
            if json.dumps(old.get(key)) != json.dumps(new.get(key)):  # 1 == 1.0, but 1 client is not a share of 1.0
                differs = f"had {key} = {old[key]!r}" if key in old else f"had no setting {key}"
                now = f", not {new[key]!r}" if key in old and key in new else ""
                raise EquipoiseError(
                    f"the run in {self.path} {differs}{now}; resume it with the same settings, or choose another --out"
                )

    def write_config(self) -> None:
        """Write run.toml."""
        atomic_files.write_text(self.config, self.text)

    def unfinished(self) -> None:
        """Remove the final results of an earlier, shorter run, because more rounds follow."""
        for path in (self.summary, self.path / "clients.csv", self.models, self.forecasts):
            path.unlink(missing_ok=True)

    @staticmethod
    def open(path: Path) -> "RunFolder":
        """Open the folder of an existing run for reading."""
        folder = RunFolder(path)
        if not folder.config.exists():
            raise EquipoiseError(f"{path} is not the folder of a run: it has no run.toml")
        return folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder; the operating system releases it when the process ends, however it ends."""
        with (self.path / "lock").open("w") as file:
            if not any(_lock(file, fcntl.LOCK_EX) for _ in range(_TRIES)):
                raise EquipoiseError(f"another process is using {self.path}; wait for it, or choose another --out")
            yield

    def at_work_now(self) -> bool:
        """Tell whether a process holds the lock of the folder.

        Asking takes a shared lock for a moment; `locked` tries several times because of that.
        """
        try:
            with (self.path / "lock").open() as file:
                return not _lock(file, fcntl.LOCK_SH, wait=0.0)
        except FileNotFoundError:
            return False

    def append(self, log: Path, line: dict[str, Any]) -> None:
        """Append a line to a log, and flush it to disk."""
        try:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise EquipoiseError(f"cannot write {log}: {error.strerror}; the last checkpoint is intact") from None

    def log_facts(self) -> dict[str, dict[str, Any]]:
        """Return the lengths and digests of the logs, for a checkpoint; only what was appended since is read."""
        digests = {log.name: prefix.read_on() for log, prefix in self.prefixes.items()}
        return {"logs": {log.name: prefix.length for log, prefix in self.prefixes.items()}, "log_digests": digests}

    def find_change(self, log: Path, facts: Mapping[str, Any]) -> str | None:
        """Return how a log differs from what it began with at the checkpoint with these facts; None if it does not."""
        return find_change(log, facts.get("logs", {}).get(log.name, 0), facts.get("log_digests", {}).get(log.name))

    def set_aside(self, log: Path) -> Path:
        """Rename a log that does not belong to the run's checkpoint, so that a new one begins; return its new path."""
        number = 1
        while (path := log.with_name(f"{log.stem}-{number}{log.suffix}")).exists():
            number += 1
        if log.exists():
            log.rename(path)
        return path

    def cut(self, log: Path, length: int) -> None:
        """Truncate a log to the length that it had at a checkpoint."""
        log.touch()
        with log.open("rb+") as file:
            file.truncate(length)

    def length(self, log: Path) -> int:
        """Return the length of a log in bytes."""
        return log.stat().st_size if log.exists() else 0

    def write_clients(
        self,
        names: tuple[str, ...],
        marks: Mapping[str, frozenset[str]],
        sizes: dict[str, np.ndarray],
        tables: dict[str, np.ndarray],
        columns: Sequence[str],
    ) -> None:
        """Write clients.csv, with one row per client.

        Args:
            names: names of the clients.
            marks: groups of clients, such as "unseen" or "malicious"; each that is not empty is a column.
            sizes: number of samples of each client, for each split.
            tables: scores of each client, for each kind of model.
            columns: names of the scores.
        """
        marks = {mark: marked for mark, marked in marks.items() if marked}

        def lines() -> Iterator[list[Any]]:
            for i, name in enumerate(names):
                scores = [table[i, k] for table in tables.values() for k in range(len(columns))]
                flag = [str(name in marked).lower() for marked in marks.values()]
                numbers = (int(s[i]) for s in sizes.values())
                yield [name, *flag, *numbers, *("" if np.isnan(v) else v for v in scores)]

        head = ["client", *marks, *sizes, *(f"{kind}_{c}" for kind in tables for c in columns)]
        self.write_table(self.path / "clients.csv", head, lines())

    def write_table(self, path: Path, head: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
        """Write a table as CSV; what is None is an empty cell.

        Args:
            path: the file.
            head: names of the columns.
            lines: the cells of each row.
        """
        with atomic_files.atomic_write(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(lines)

    def read_summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        if not self.summary.exists():
            raise EquipoiseError(f"{self.path} has no summary.json: the run is not finished; continue it with --resume")
        summary: dict[str, Any] = atomic_files.read_json(self.summary)
        return summary

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        return self.read(self.metrics)

    def read(self, log: Path) -> list[dict[str, Any]]:
        """Return the complete lines of a log; the last one may be in the middle of being written."""
        if not log.exists():
            return []
        try:
            return [json.loads(line) for line in log.read_text(encoding="utf-8").split("\n")[:-1]]
        except ValueError as error:
            raise EquipoiseError(f"{log} is damaged ({error}); start the run again with another --out") from None
