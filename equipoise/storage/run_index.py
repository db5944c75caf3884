"""Search for runs in folders, which of them can be compared, and grouping of runs that differ only in the seed."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.storage.client_scores import ClientScores, read_client_scores
from equipoise.storage.run_folder import ASIDE, FAILED, PROBLEM, WRITTEN, RunFolder, read_settings
from equipoise.storage.sweep_choices import rejected_runs

_SAMPLES = "data.samples"
_NAMED = 3  # runs that a sentence about skipped runs names
_FOR_READERS = (f"{WRITTEN}.", *ASIDE)  # runs that differ only in these are the same run


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, read from its folder."""

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    drawn: str = ""
    "digest of the data as the seed drew and split them, for runs from Python"
    recorded_clients: ClientScores | None = None
    "test scores of single clients, for runs that are read from a record"

    def client_scores(self) -> ClientScores:
        """Return the test score of each client, of its personal model, else of the global one."""
        if self.recorded_clients is None:
            return read_client_scores(self.path)
        if not self.recorded_clients:
            raise EquipoiseError(
                f"the record {self.path} has no scores of single clients, like all of earlier versions; name the "
                "folder of its run"
            )
        return self.recorded_clients


@dataclass(frozen=True)
class SkippedRuns:
    """The runs in some folders that are not compared."""

    unfinished: tuple[Path, ...] = ()
    failed: tuple[Path, ...] = ()
    rejected: tuple[Path, ...] = ()
    "finished runs with values that the tuning of their sweep did not choose"

    def sentences(self) -> list[str]:
        """Return one sentence per reason, without a full stop."""
        return [
            f"{what} runs skipped: {len(runs)} ({_named(runs)}); {advice}"
            for what, runs, advice in (
                ("unfinished", self.unfinished, "--resume continues a run"),
                ("failed", self.failed, f"{FAILED} in each has the reason"),
                (
                    "rejected",
                    self.rejected,
                    "trials of a sweep, or values that it did not choose; --all shows them",
                ),
            )
            if runs
        ]


def _named(runs: tuple[Path, ...]) -> str:
    return ", ".join(run.absolute().name for run in runs[:_NAMED]) + (", …" if len(runs) > _NAMED else "")


def search_folders(paths: list[Path]) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the run folders in these folders and below them: of finished, unfinished and failed runs.

    Args:
        paths: the folders.
    """
    finished: dict[Path, None] = {}
    unfinished: dict[Path, None] = {}
    failed: dict[Path, None] = {}
    for path in paths:
        if path.is_file():
            place = f", such as {path.parent}" if path.name == "run.toml" else ""
            raise EquipoiseError(f"{path} is a file; name the folder of a run{place}, or a folder of run folders")
        if not path.is_dir():
            raise EquipoiseError(f"there is no folder {path}")
        inside = list(_inside(path))
        if not inside:
            raise EquipoiseError(f"{path} holds no run: neither it nor a folder in it has a run.toml")
        for run in inside:
            kind = finished if _finished(run) else failed if (run / FAILED).exists() else unfinished
            kind[run] = None
    return list(finished), list(unfinished), list(failed)


def search_runs(paths: list[Path], rejected: bool = False) -> tuple[list[FinishedRun], SkippedRuns]:
    """Return the runs that can be compared in these folders and in the folders below them, and those that cannot.

    Runs that the tuning of a sweep rejected are returned if there are no others.

    Args:
        paths: the folders.
        rejected: whether to return rejected runs in any case.
    """
    finished, unfinished, failed = search_folders(paths)
    if not finished:
        first, *others = [*unfinished, *failed]
        if first in failed:
            raise EquipoiseError(f"{first} has no summary.json: the run failed; its {FAILED} has the reason")
        also = f"; also unfinished or failed: {_named(tuple(others))}" if others else ""
        raise EquipoiseError(f"{first} has no summary.json: the run is not finished; continue it with --resume{also}")
    refused = [] if rejected else _rejected(finished)
    if len(refused) == len(finished):
        refused = []
    found = [_read(run) for run in finished if run not in refused]
    return found, SkippedRuns(tuple(unfinished), tuple(failed), tuple(refused))


def _rejected(runs: Iterable[Path]) -> list[Path]:
    places = {run.absolute().parent for run in runs}
    names = {place: rejected_runs(place) for place in places}
    return [run for run in runs if run.absolute().name in names[run.absolute().parent]]


def find_runs(paths: list[Path]) -> list[FinishedRun]:
    """Return all finished runs in these folders and in the folders below them."""
    return search_runs(paths, rejected=True)[0]


def newest(path: Path) -> Path | None:
    """Return the run in a folder or, of those below it, the one that was written last."""
    if not path.is_dir():
        return None
    return max((run for run in _inside(path) if (run / "run.toml").is_file()), key=_written, default=None)


def _written(run: Path) -> float:
    """Return the time of the last change in a run folder."""
    times = [run.stat().st_mtime]
    for path in run.iterdir():
        with suppress(FileNotFoundError):  # a temporary file may be renamed meanwhile
            times.append(path.stat().st_mtime)
    return max(times)


def _inside(path: Path) -> Iterator[Path]:
    """Yield the run folders in a folder, up to three levels below it, but not inside of other run folders.

    `equipoise reproduce` puts runs two levels below the folder of a paper, and three below that of all papers.
    """
    level = [path]
    for _ in range(4):
        runs = [each for each in level if _is_run(each)]
        yield from runs
        level = sorted(p for each in level if each not in runs for p in _folders(each))


def _is_run(path: Path) -> bool:
    """Tell whether a folder is that of a run; a user's own experiment may be named run.toml as well."""
    config = path / "run.toml"
    if not config.is_file():
        return (path / FAILED).is_file()
    with suppress(OSError, UnicodeDecodeError):
        return RunFolder(path).metrics.exists() or f"[{WRITTEN}]" in config.read_text(encoding="utf-8")
    return True  # reading it will raise an error that says what is wrong


def _folders(path: Path) -> list[Path]:
    with suppress(OSError):  # someone else's folder, which cannot be read
        return [each for each in path.iterdir() if each.is_dir()]
    return []


def _finished(path: Path) -> bool:
    return RunFolder(path).summary.exists()


def _read(path: Path) -> FinishedRun:
    folder = RunFolder.open(path)
    written = read_settings(folder.config)
    config = {k: v for k, v in written.items() if not k.startswith(_FOR_READERS)}
    drawn = str(config.get(_SAMPLES, ""))
    if (problem := written.get(f"{WRITTEN}.{PROBLEM}")) is not None:
        config[_SAMPLES] = problem  # the seed draws splits and unseen clients, and runs that differ only so are alike
    return FinishedRun(path, config, folder.read_summary(), folder.read_metrics(), drawn)


def higher_is_better(summary: Mapping[str, Any]) -> bool:
    """Tell whether higher values of a run's metric are better; summaries of older versions do not say so."""
    return bool(summary.get("higher_is_better", summary["metric"] not in ("rmse", "mse")))


def grouped(runs: list[FinishedRun]) -> list[list[FinishedRun]]:
    """Group runs that differ only in the seed."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        # Which part of a dataset was available is not a setting, but runs on an excerpt and on the whole differ.
        described = [run.summary["dataset"], run.summary["metric"]]
        key = json.dumps([{k: v for k, v in run.config.items() if k != "seed"}, described], sort_keys=True)
        group = groups.setdefault(key, [])
        if all((run.summary["seed"], run.drawn) != (other.summary["seed"], other.drawn) for other in group):
            group.append(run)  # a copy is not another seed
    return list(groups.values())


PAPER = "paper.json"
"""File in the folder of a paper's runs, with the tables made from them, for `equipoise report`."""
