"""Run an exhibit of a paper, and compare the results with the published figures."""

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equipoise.reporting import plots
from equipoise.reproduction.comparison import compare_with_paper, fits
from equipoise.reproduction.exhibits import LONG, Exhibit, cost
from equipoise.reproduction.pieces import Piece
from equipoise.reproduction.scale_differences import cut_runs, reduced
from equipoise.runs import process_pool
from equipoise.runs.recorded_runs import RecordedRuns
from equipoise.runs.sweep import expand_sweep
from equipoise.runs.sweep_results import SweepResults
from equipoise.runs.tuning import record_tuning
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import RunFolder, flatten, read_toml
from equipoise.storage.run_index import PAPER, FinishedRun

_CKA_SAMPLES = 500


def pieces(
    exhibit: Exhibit,
    out: Path,
    scale: str,
    only: Sequence[str] = (),
    seeds: int | None = None,
    sets: Sequence[str] = (),
    records: RecordedRuns | None = None,
) -> list[Piece]:
    """Return everything that is to be run.

    The runs of a file are in one folder for all exhibits, so runs that two exhibits share are done once.

    Args:
        exhibit: the exhibit.
        out: the folder of all runs.
        scale: smoke, small or paper.
        only: names of the parts to run; all if empty.
        seeds: number of seeds from 0 on, in place of those of the files.
        sets: settings in the form SECTION.KEY=VALUE, which override the files.
        records: records of earlier runs, whose results are taken.
    """
    found = []
    # If it is killed, at most one round is lost. When states are saved is not part of a run's identity.
    always = ["checkpoint_every=1", *([f"seed={list(range(seeds))}"] if seeds else [])]
    for part in exhibit.chosen(list(only)):
        for file in part.files:
            tables = read_toml(exhibit.folder / f"{file}.toml")
            every, sweep = expand_sweep(
                tables, scale, [*part.set, *always, *sets], others=False, folders=[exhibit.folder, exhibit.place]
            )
            chosen = tuple(c for c in every if fits(flatten(c.experiment.tables()), exhibit.where))
            known = cost(exhibit, file, part, scale)
            results = SweepResults(out / exhibit.paper / file, records)
            if chosen:
                found.append(Piece(part, file, chosen, sweep, results, known.seconds if known else None))
    return found


def estimate(exhibit: Exhibit, scale: str, jobs: int = 2) -> float | None:
    """Return the seconds that an exhibit takes with this many runs at a time, or None if a file was never measured."""
    total = 0.0
    asked = {(p.part.name, p.file): len(p.every) for p in pieces(exhibit, Path(), scale)} if exhibit.where else {}
    for part in exhibit.parts:
        for file in part.files:
            known = cost(exhibit, file, part, scale)
            if known is None:
                return None
            total += (asked.get((part.name, file), 0) if exhibit.where else known.runs) * known.seconds
    return total / jobs


def status(exhibit: Exhibit, missing: Sequence[str], subsets: Sequence[str], whole: float | None) -> str:
    """Return how much of an exhibit can be run here, in a few words.

    Args:
        exhibit: the exhibit.
        missing: its data sets that are missing.
        subsets: its data sets of which there is only a subset.
        whole: seconds at the scale paper, if known.
    """
    if exhibit.why:
        return "nothing to run"
    if missing:
        return f"needs data: {', '.join(missing)}"
    if whole is not None and whole > LONG:
        return "small runs here; in full it takes days"
    much = "on a subset" if exhibit.lacks or subsets else "in full"
    return much if whole is not None else f"{much}, time not known"


class Overall:
    """The progress of many runs, from the rounds in their logs."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.plans = [(piece, piece.planned()) for piece in pieces]
        self.over: set[Path] = set()
        "folders of finished and failed runs"
        self.count = sum(len(planned) for _, planned in self.plans)
        self.total = sum(piece.weight(cell) for piece, planned in self.plans for cell in planned)

    def look(self) -> float:
        """Return how much is done, in the units of `total`."""
        done = 0.0
        self.plans = [(piece, piece.planned() if piece.sweep.tune else planned) for piece, planned in self.plans]
        for piece, planned in self.plans:
            for cell in planned:
                folder = cell.folder(piece.folder)
                if folder not in self.over and piece.over(cell):
                    self.over.add(folder)
                part = 1.0 if folder in self.over else rounds_of(folder) / cell.experiment.schedule.rounds
                done += piece.weight(cell) * part
        return done


def rounds_of(folder: Path) -> int:
    """Return the number of finished rounds of a run."""
    try:
        return RunFolder(folder).timings.read_bytes().count(b"\n")
    except OSError:
        return 0


def execute(pieces: Sequence[Piece], data: Path | None, at_a_time: int, report: process_pool.Told) -> None:
    """Do all runs, this many at a time, and call `report` with each that ends; trials come first."""
    for piece in pieces:
        if piece.sweep.tune:
            process_pool.execute(piece.results.to_run(piece.trials()), piece.folder, data, at_a_time, report)
            record_tuning(piece.every, piece.sweep, piece.results)
        process_pool.execute(piece.results.to_run(piece.wanted()), piece.folder, data, at_a_time, report)


def finished(pieces: Sequence[Piece]) -> dict[str, list[FinishedRun]]:
    """Return the finished runs, by the name of the part."""
    found: dict[str, list[FinishedRun]] = {}
    for piece in pieces:
        found.setdefault(piece.part.name, []).extend(piece.results.runs(piece.wanted()))
    return found


def draw(exhibit: Exhibit, runs: dict[str, list[FinishedRun]], scale: str, out: Path, data: Path | None) -> list[Path]:
    """Draw the pictures of an exhibit: one per part and combination of the settings in `each`.

    Args:
        exhibit: the exhibit.
        runs: its finished runs, by the name of the part.
        scale: the scale of the runs, for the names of the pictures.
        out: the folder of all runs.
        data: the folder of data sets, or None for the default.

    Returns:
        The files of the pictures.
    """
    found = []
    for part, some in runs.items():
        apart: dict[str, list[FinishedRun]] = {}
        for run in some:
            name = "-".join(str(run.config[key]) for key in exhibit.each if key in run.config)
            apart.setdefault(name, []).append(run)
        for name, mine in apart.items():
            words = [exhibit.name, part, name, scale]
            atomic_files.make_folder(out / exhibit.paper)
            path = out / exhibit.paper / ("-".join(word for word in words if word) + ".png")
            if exhibit.plot == "cka":
                from equipoise.runs.launch import reopen

                alike = [(run, reopen(run.path, data)[0]) for run in mine]
                compared = [result.similarity(_CKA_SAMPLES, name=run.path.name) for run, result in alike]
                for similarity, run in zip(compared, mine, strict=True):
                    similarity.write(run.path)
                plots.draw_similarity(compared, path)
            else:
                plots.draw(exhibit.plot, mine, path)
            found.append(path)
    return found


def keep(exhibit: Exhibit, out: Path, scale: str, seeds: int | None, records: RecordedRuns | None = None) -> None:
    """Write the tables for `equipoise report`, of all parts that have finished runs.

    Args:
        exhibit: the exhibit.
        out: the folder of all runs.
        scale: the scale of the runs.
        seeds: number of seeds, in place of those of the files.
        records: records of earlier runs, whose results are taken.
    """
    planned = pieces(exhibit, out, scale, (), seeds, records=records)
    runs = {part: some for part, some in finished(planned).items() if some}
    path = out / exhibit.paper / PAPER
    sizes = reduced(exhibit, [piece for piece in planned if piece.part.name in runs])
    notes = [f"scale {scale} (in parentheses: paper): {sizes}"] if sizes else []
    compared = compare_with_paper(exhibit, runs, scale, cut_runs(exhibit, planned))
    tables = [table.as_json() for table in compared]
    if sum(table.cut() for table in compared):
        notes.append("figures of runs that are smaller than the paper's have no ▲ ▼")
    entry = {"notes": "; ".join([*notes, *([exhibit.differs] if exhibit.differs else [])]), "tables": tables}
    atomic_files.make_folder(path.parent)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may run exhibits of one paper
        kept: dict[str, Any] = atomic_files.read_json(path) if path.exists() else {}
        atomic_files.write_json(path, kept | {f"{exhibit.id} ({scale}{f', {seeds} seeds' if seeds else ''})": entry})
