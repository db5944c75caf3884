"""The recorded results of a paper's exhibits, which are kept in the folder `results` beside its sweeps."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from equipoise.reproduction.exhibits import SCALES, Exhibit
from equipoise.reproduction.pieces import Piece
from equipoise.reproduction.runner import pieces
from equipoise.runs.recorded_runs import RecordedRuns
from equipoise.storage.run_index import FinishedRun

RESULTS = "results"
"""Folder of a paper's records."""
_NEED_FOLDERS = ("cka", "learned")
"""Plots that need the models or states of runs, which records do not have."""


def record_files(exhibit: Exhibit) -> list[Path]:
    """Return the files of records of an exhibit's paper."""
    return sorted((exhibit.folder / RESULTS).glob("*.jsonl"))


def read_recorded(exhibit: Exhibit) -> RecordedRuns:
    """Return all records of an exhibit's paper."""
    return _read(tuple((file, file.stat().st_mtime_ns) for file in record_files(exhibit)))


@cache
def _read(files: tuple[tuple[Path, int], ...]) -> RecordedRuns:
    return RecordedRuns.read([file for file, _ in files])


def can_draw(exhibit: Exhibit) -> bool:
    """Tell whether records suffice for everything that an exhibit shows."""
    return exhibit.plot not in _NEED_FOLDERS


def published_pieces(exhibit: Exhibit, scale: str, only: Sequence[str] = (), seeds: int | None = None) -> list[Piece]:
    """Return the runs of an exhibit whose only results are records.

    Args:
        exhibit: the exhibit.
        scale: smoke, small or paper.
        only: names of the parts; all if empty.
        seeds: number of seeds from 0 on, in place of those of the files.
    """
    if not record_files(exhibit):
        return []
    nowhere = exhibit.folder / RESULTS  # it has records but no run folders
    return pieces(exhibit, nowhere, scale, only, seeds, records=read_recorded(exhibit))


def published_runs(some: Sequence[Piece]) -> dict[str, list[FinishedRun]]:
    """Return the recorded runs by the name of the part, without trials; parts without records are left out.

    Of a file that tunes, the runs with the chosen values are returned. If not all trials are recorded, the choice is
    not known, and the records themselves say which are trials.
    """
    found: dict[str, list[FinishedRun]] = {}
    for piece in some:
        chosen = piece.wanted() if piece.sweep.tune else []
        kept = [cell for cell in piece.every if (record := piece.results.record(cell)) and not record.trial]
        if runs := piece.results.runs(chosen or kept):
            found.setdefault(piece.part.name, []).extend(runs)
    return found


def count_published(exhibit: Exhibit) -> dict[str, int]:
    """Return the number of recorded runs of an exhibit at each scale that has any."""
    found = {scale: _count(exhibit, scale) for scale in SCALES if exhibit.parts and record_files(exhibit)}
    return {scale: number for scale, number in found.items() if number}


def _count(exhibit: Exhibit, scale: str) -> int:
    return sum(map(len, published_runs(published_pieces(exhibit, scale)).values()))
