"""Find finished runs below folders, and group those that differ only in the seed."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.storage.run_folder import ASIDE, WRITTEN, RunFolder, flatten, read_toml

_FOR_READERS = (f"{WRITTEN}.", *ASIDE)  # no run is another for these


@dataclass(frozen=True)
class FinishedRun:
    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]


def find_runs(paths: list[Path]) -> list[FinishedRun]:
    """The runs in these folders and in the folders below them."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise EquipoiseError(f"there is no folder {path}")
        inside = _inside(path)
        if not inside:
            raise EquipoiseError(f"{path} holds no run: neither it nor a folder in it has a run.toml")
        if len(inside) > 1:  # of many, those that are done; one alone must be
            inside = [run for run in inside if _finished(run)] or inside[:1]
        found |= dict.fromkeys(inside)
    return [_read(path) for path in found]


def unfinished(paths: list[Path]) -> list[Path]:
    """Runs below these folders that have no summary yet; they are left out."""
    return [run for path in paths for run in _inside(path) if run != path and not _finished(run)]


def newest(path: Path) -> Path | None:
    """The run in a folder, or of those below it the one that was written last."""
    if not path.is_dir():
        return None
    return max(_inside(path), key=_written, default=None)


def _written(run: Path) -> float:
    """When something in its folder changed last."""
    times = [run.stat().st_mtime]
    for path in run.iterdir():
        with suppress(FileNotFoundError):  # what is written beside is renamed meanwhile
            times.append(path.stat().st_mtime)
    return max(times)


def _inside(path: Path) -> list[Path]:
    """The runs in a folder. `equipoise reproduce` has them two folders below a paper's, three below that of all papers;
    what lies in the folder of a run is that run's own."""
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
    config = {k: v for k, v in flatten(read_toml(folder.config)).items() if not k.startswith(_FOR_READERS)}
    return FinishedRun(path, config, folder.read_summary(), folder.read_metrics())


def higher_is_better(summary: Mapping[str, Any]) -> bool:
    """Of the metric; summaries of old do not say."""
    return bool(summary.get("higher_is_better", summary["metric"] not in ("rmse", "mse")))


def grouped(runs: list[FinishedRun]) -> list[list[FinishedRun]]:
    """Runs that differ only in the seed, together."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        # What was at hand of a data set is no setting: an excerpt and the whole are not seeds of one run.
        told = [run.summary["dataset"], run.summary["metric"]]
        key = json.dumps([{k: v for k, v in run.config.items() if k != "seed"}, told], sort_keys=True)
        group = groups.setdefault(key, [])
        if run.summary["seed"] not in [other.summary["seed"] for other in group]:  # a copy of a run is no second seed
            group.append(run)
    return list(groups.values())


PAPER = "paper.json"
"""In the folder of a paper's runs: the tables that were made of them, for `equipoise report`."""
