"""How the runs of a scale differ from those of the paper: in which sizes, and whose figures cannot be compared."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from equipoise.reproduction.comparison import fits
from equipoise.reproduction.exhibits import Exhibit
from equipoise.reproduction.pieces import Piece
from equipoise.runs.sweep import SweepRun, expand_sweep
from equipoise.storage.run_folder import ASIDE, flatten, read_toml

_NO_RESULTS = ("seed", "evaluate_every", "targets", *ASIDE)
"""Settings that do not make a run another one than the paper's."""


def _paper_runs(exhibit: Exhibit, piece: Piece) -> list[SweepRun]:
    """Return the runs of a piece as they are at the scale paper."""
    tables, folders = read_toml(exhibit.folder / f"{piece.file}.toml"), [exhibit.folder, exhibit.place]
    whole, _ = expand_sweep(tables, "paper", piece.part.set, others=False, folders=folders)
    return [c for c in whole if fits(flatten(c.experiment.tables()), exhibit.where)]


def cut_runs(exhibit: Exhibit, pieces: Sequence[Piece]) -> set[Path]:
    """Return the paths of runs that are not among those at the scale paper, apart from the seed.

    Fewer seeds only widen the spread, and how often models are scored changes no model; all other settings do.
    """
    found = set()
    for piece in pieces:
        theirs = {_results(cell) for cell in _paper_runs(exhibit, piece)}
        found |= {piece.results.path(cell) for cell in piece.every if _results(cell) not in theirs}
    return found


def _results(cell: SweepRun) -> str:
    """Return the settings of a run that affect its results, apart from the seed."""
    settings = flatten(cell.experiment.tables())
    return json.dumps({k: v for k, v in settings.items() if not k.startswith(_NO_RESULTS)}, sort_keys=True)


def reduced(exhibit: Exhibit, pieces: Sequence[Piece]) -> str:
    """Return the sizes in which the runs differ from those at the scale paper, in words; empty if in none."""
    found: dict[str, tuple[set[int], set[int]]] = {}
    for piece in pieces:
        for what, (mine, paper) in _sizes(piece.every, _paper_runs(exhibit, piece)).items():
            ours, others = found.setdefault(what, (set(), set()))
            ours |= mine
            others |= paper
    words = [f"{what} {_span(a)} ({_span(b)})" for what, (a, b) in found.items() if a != b]
    return ", ".join(words)


def _sizes(mine: Sequence[SweepRun], paper: Sequence[SweepRun]) -> dict[str, tuple[set[int], set[int]]]:
    measures: dict[str, Callable[[Sequence[SweepRun]], set[int]]] = {
        "rounds": lambda every: {c.experiment.schedule.rounds for c in every},
        "seeds": lambda every: {len({c.seed for c in every})},
        "clients": lambda every: {int(flatten(c.experiment.tables()).get("data.clients") or 0) for c in every},
        "samples per client at most": lambda every: {
            int(flatten(c.experiment.tables()).get("data.most") or 0) for c in every
        },
    }
    return {what: (measure(mine), measure(paper)) for what, measure in measures.items()}


def _span(numbers: set[int]) -> str:
    shown = sorted(numbers - {0})
    if not shown:
        return "all"
    return str(shown[0]) if len(shown) == 1 else f"{shown[0]} to {shown[-1]}"
