"""Search for runs in folders, and grouping of runs that differ only in the seed."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.storage.run_folder import ASIDE, WRITTEN, RunFolder, read_settings

_FOR_READERS = (f"{WRITTEN}.", *ASIDE)  # runs that differ only in these are the same run


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, read from its folder."""

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]


def find_runs(paths: list[Path]) -> list[FinishedRun]:
    """Return the finished runs in these folders and in the folders below them."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise EquipoiseError(f"there is no folder {path}")
        inside = _inside(path)
        if not inside:
            raise EquipoiseError(f"{path} holds no run: neither it nor a folder in it has a run.toml")
        if len(inside) > 1:  # unfinished runs among several are dropped; a single run must be finished
            inside = [run for run in inside if _finished(run)] or inside[:1]
        found |= dict.fromkeys(inside)
    return [_read(path) for path in found]


def unfinished(paths: list[Path]) -> list[Path]:
    """Return the runs below these folders that `find_runs` drops because they have no summary yet."""
    return [run for path in paths for run in _inside(path) if run != path and not _finished(run)]


def newest(path: Path) -> Path | None:
    """Return the run in a folder or, of those below it, the one that was written last."""
    if not path.is_dir():
        return None
    return max(_inside(path), key=_written, default=None)


def _written(run: Path) -> float:
    """Return the time of the last change in a run folder."""
    times = [run.stat().st_mtime]
    for path in run.iterdir():
        with suppress(FileNotFoundError):  # a temporary file may be renamed meanwhile
            times.append(path.stat().st_mtime)
    return max(times)


def _inside(path: Path) -> list[Path]:
    """Return the run folders in a folder, up to three levels below it, but not inside of other run folders.

    `equipoise reproduce` puts runs two levels below the folder of a paper, and three below that of all papers.
    """
    found: list[Path] = []
    level = [path]
    for _ in range(4):
        runs = [each for each in level if (each / "run.toml").is_file()]
        found += runs
        level = sorted(p for each in level if each not in runs for p in each.iterdir() if p.is_dir())
    return found


def _finished(path: Path) -> bool:
    return RunFolder(path).summary.exists()


def _read(path: Path) -> FinishedRun:
    folder = RunFolder.open(path)
    config = {k: v for k, v in read_settings(folder.config).items() if not k.startswith(_FOR_READERS)}
    return FinishedRun(path, config, folder.read_summary(), folder.read_metrics())


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
        if run.summary["seed"] not in [other.summary["seed"] for other in group]:  # a copy is not another seed
            group.append(run)
    return list(groups.values())


PAPER = "paper.json"
"""File in the folder of a paper's runs, with the tables made from them, for `equipoise report`."""
