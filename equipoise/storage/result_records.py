"""Records of results: one line of JSON per finished run, in a small file that can be kept beside an experiment.

A record has everything that tables and plots need, so that they can be made without the run folders, and all settings
that affect results, so that a run that is planned later can be recognised.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.storage import atomic_files
from equipoise.storage.record_checks import check_clients, check_curves, check_summary
from equipoise.storage.run_folder import current_names
from equipoise.storage.run_index import FinishedRun

SUFFIX = ".jsonl"
TRAINING_SECONDS = "train_seconds"
"""Curve of the seconds of training up to each evaluation."""


@dataclass(frozen=True)
class Record:
    """What is kept of a run."""

    digest: str
    "digest of the settings that differ from their defaults, without the seed"
    seed: int
    settings: dict[str, Any]
    "all settings that affect results, with dotted names, without the seed"
    summary: dict[str, Any] = field(default_factory=dict)
    "figures of summary.json; empty if the run failed"
    curves: dict[str, list[Any]] = field(default_factory=dict)
    "rounds of evaluations, and one list per figure of metrics.jsonl"
    clients: dict[str, dict[str, float]] = field(default_factory=dict)
    "test scores of single clients: of those that trained, and of unseen ones; empty if the run has none"
    versions: dict[str, str] = field(default_factory=dict)
    "versions of the software that made the run"
    scale: str = ""
    "scale of the sweep, if known"
    trial: bool = False
    "whether the run only served to choose values for others"
    failed: str = ""
    "reason why the run failed, if it did"

    def line(self) -> str:
        """Return the record as a line of JSON; what is empty is left out."""
        always = ("digest", "seed", "settings")
        return json.dumps({k: v for k, v in asdict(self).items() if v or k in always}, ensure_ascii=False)

    def same_run(self, other: "Record") -> bool:
        """Tell whether another record is of the same run, perhaps by a version with more settings."""
        if self.seed != other.seed:
            return False
        if self.settings == other.settings:
            return True
        common = self.settings.keys() & other.settings.keys()
        return self.digest == other.digest and all(self.settings[key] == other.settings[key] for key in common)

    def as_run(self, file: Path) -> FinishedRun:
        """Return the record in the form in which runs are compared and drawn.

        Args:
            file: the file of the record, by which the run is named.
        """
        summary = {"algorithm": self.settings.get("algorithm.name", ""), "seed": self.seed, **self.summary}
        return FinishedRun(
            file / f"{self.digest}-seed{self.seed}",
            {**self.settings, "seed": self.seed},
            summary,
            self._lines(),
            recorded_clients=self.clients,
        )

    def _lines(self) -> list[dict[str, Any]]:
        """Return the curves as lines of metrics.jsonl."""
        lines: list[dict[str, Any]] = [{"round": number} for number in self.curves.get("round", ())]
        for name, values in self.curves.items():
            for line, value in zip(lines, values, strict=True):
                *path, last = name.split(".")
                at = line
                for step in path:
                    at = at.setdefault(step, {})
                at[last] = value
        return lines


def read_records(path: Path) -> list[Record]:
    """Return the records in a file; settings that an older version named otherwise have their names of today."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise EquipoiseError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise EquipoiseError(f"{path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(_parse(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise EquipoiseError(
                    f"line {number} of {path} is not the record of a run ({error}); remove it, or restore the file"
                ) from None
    return found


def recorded_runs(path: Path, trials: bool = False) -> list[FinishedRun]:
    """Return the finished runs in a file of records.

    Args:
        path: the file.
        trials: whether to return runs that only served to choose values, too; they are returned if there are no others.
    """
    done = [record for record in read_records(path) if not record.failed]
    wanted = [record for record in done if trials or not record.trial] or done
    if not wanted:
        raise EquipoiseError(f"{path} has no finished run")
    return [record.as_run(path) for record in wanted]


_TYPES: dict[str, type] = {
    **{
        "digest": str,
        "seed": int,
        "settings": dict,
        "summary": dict,
        "curves": dict,
        "versions": dict,
        "clients": dict,
    },
    **{"scale": str, "trial": bool, "failed": str},
}


def _parse(table: Mapping[str, Any]) -> Record:
    for key, value in table.items():
        if key in _TYPES and (not isinstance(value, _TYPES[key]) or (key == "seed" and isinstance(value, bool))):
            raise ValueError(f"its {key} has the wrong form")
    record = Record(**{key: value for key, value in table.items() if key in _TYPES})  # later versions may add keys
    if not isinstance(record.settings.get("algorithm.name", ""), str):
        raise ValueError("its algorithm.name is not a word")
    check_curves(record.curves)
    check_clients(record.clients)
    if not record.failed:
        check_summary(record.summary)
    return Record(**{**vars(record), "settings": current_names(record.settings)})


@dataclass(frozen=True)
class Added:
    """How a file of records has changed."""

    new: int
    replaced: int
    unchanged: int


def add_records(path: Path, records: Sequence[Record]) -> Added:
    """Write records to a file, in place of earlier ones of the same runs; the file is sorted.

    Several processes may add to one file; it is replaced as a whole, so that readers see all of a change or nothing.

    Args:
        path: the file; it and its folder are created if necessary.
        records: the records.
    """
    check_records_file(path)
    atomic_files.make_folder(path.parent)
    new = replaced = unchanged = 0
    with _locked(path.parent):
        kept = read_records(path) if path.exists() else []
        for record in records:
            at = [i for i, other in enumerate(kept) if other.same_run(record)]
            if at and kept[at[-1]] == record:
                unchanged += 1
                continue
            kept = [other for i, other in enumerate(kept) if i not in at] + [record]
            new, replaced = (new, replaced + 1) if at else (new + 1, replaced)
        if new or replaced:
            _write(path, kept)
    return Added(new, replaced, unchanged)


def mark_trials(path: Path, decide: Callable[[list[Record]], Mapping[int, bool]]) -> None:
    """Change which runs in a file are trials, and nothing else: other processes may have written newer results.

    Args:
        path: the file; nothing happens if there is none.
        decide: gets the records that are in the file now, and returns which are trials, by their positions; records
            that it does not name stay as they are.
    """
    if not path.exists():
        return
    with _locked(path.parent):
        before = read_records(path)
        trial = decide(before)
        now = [replace(record, trial=trial.get(i, record.trial)) for i, record in enumerate(before)]
        if now != before:
            _write(path, now)


def _write(path: Path, records: Sequence[Record]) -> None:
    atomic_files.write_text(path, "".join(record.line() + "\n" for record in sorted(records, key=_order)))


def prepare_records_file(path: Path) -> None:
    """Raise an error unless records can be written to a file, before any work is done for it; create its folder.

    Args:
        path: the file.
    """
    try:
        check_records_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            trial = path.with_name(path.name + ".part")
            trial.touch()
            trial.unlink()
            if path.exists():
                path.open("rb").close()
    except OSError as error:
        raise EquipoiseError(
            f"records cannot be written to {path}: {error.strerror or error}; name a file in a folder of your own"
        ) from None


def check_records_file(path: Path) -> None:
    """Raise an error unless the name of a file is that of a file of records."""
    if path.is_dir():
        raise EquipoiseError(f"{path} is a folder; name a file of records, such as {path / 'results.jsonl'}")
    if path.suffix != SUFFIX:
        raise EquipoiseError(f"{path} is not allowed; records are lines of JSON, so name the file FILE{SUFFIX}")


def _order(record: Record) -> tuple[str, str, str, int]:
    name = record.settings.get
    return str(name("data.name")), str(name("algorithm.name")), record.digest, record.seed


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder itself, so that no lock file is left in a repository."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
