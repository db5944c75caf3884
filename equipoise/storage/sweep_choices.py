"""The choices of tuned sweeps: which runs in a folder have values that were rejected on validation samples."""

import fcntl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.storage import atomic_files

SWEEP = "sweep.json"
"""File in the folder of a tuned sweep, with the runs that were chosen and those that were rejected."""


def record_choices(
    folder: Path,
    tune: Sequence[str],
    by: str,
    chosen: Mapping[str, bool],
    trials: Sequence[str] = (),
    choices: Mapping[str, Any] | None = None,
) -> None:
    """Write which runs of a sweep were chosen; for runs of several sweeps in one folder, the last sweep decides.

    Args:
        folder: the folder of all run folders.
        tune: the settings that were tuned; empty if all values are wanted.
        by: kind of model whose score decided.
        chosen: whether each run was chosen, by the name of its folder.
        trials: names of the folders of runs that only served to choose.
        choices: the chosen values and those that were tried, by the digest of the group of runs.
    """
    path = folder / SWEEP
    if not tune and not path.exists():
        return
    atomic_files.make_folder(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may share the folder
        before = _read(path)
        known: dict[str, bool] = {
            **dict.fromkeys(before.get("chosen", ()), True),
            **dict.fromkeys(before.get("rejected", ()), False),
            **chosen,
        }
        now = {
            "tune": list(tune) or before.get("tune", []),
            "by": by,
            "chosen": sorted(name for name, good in known.items() if good),
            "rejected": sorted(name for name, good in known.items() if not good),
        }
        if only_trials := sorted(
            {*before.get("trials", ()), *trials} - {name for name, good in chosen.items() if good}
        ):
            now["trials"] = only_trials
        if values := {**before.get("choices", {}), **(choices or {})}:
            now["choices"] = dict(sorted(values.items()))
        if now != before:
            atomic_files.write_json(path, now)


def rejected_runs(folder: Path) -> frozenset[str]:
    """Return the names of the run folders in a folder that a sweep rejected, or that only served to choose."""
    found = _read(folder / SWEEP)
    return frozenset((*found.get("rejected", ()), *found.get("trials", ())))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = atomic_files.read_json(path)
    if not isinstance(found, dict):
        raise EquipoiseError(f"{path} is damaged; remove it, and repeat the command that wrote it")
    return found
