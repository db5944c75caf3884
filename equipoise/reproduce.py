"""Running an exhibit of a paper, and setting what came out beside what the paper prints."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from equipoise import files, jobs, plots
from equipoise.exhibits import LONG, Exhibit, Figure, Line, Part, cost
from equipoise.report import Run, find_runs
from equipoise.runfolder import RunFolder, flatten, read_toml
from equipoise.sweep import Cell, Sweep, cells, tuned

PAPER = "paper.json"
"""In the folder of a paper's runs: the tables that were made of them, for `equipoise report`."""
_CKA_SAMPLES = 500


@dataclass(frozen=True)
class Piece:
    """The runs of one file that a part of an exhibit asks for, and where they are kept."""

    part: Part
    file: str
    every: tuple[Cell, ...]
    sweep: Sweep
    folder: Path
    seconds: float | None
    "that one of its runs takes, if that is known"

    def trials(self) -> list[Cell]:
        """Those by which settings are chosen, if any are."""
        return tuned(self.every, self.sweep, self.folder)[0]

    def wanted(self) -> list[Cell]:
        return tuned(self.every, self.sweep, self.folder)[1]


def fits(config: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """1 is 1.0, as TOML has it where a person writes either; a setting that is not there is no value."""
    return all(key in config and config[key] == value for key, value in where.items())


def pieces(
    exhibit: Exhibit,
    out: Path,
    scale: str,
    only: Sequence[str] = (),
    seeds: int | None = None,
    sets: Sequence[str] = (),
) -> list[Piece]:
    """All that is to be run. Runs of a file lie in one folder whichever exhibit asks for them: what two share is run
    once."""
    found = []
    # Whoever kills it should lose a round at most; when states are saved is no part of what a run is.
    always = ["checkpoint_every=1", *([f"seed={list(range(seeds))}"] if seeds else [])]
    for part in exhibit.chosen(list(only)):
        for file in part.files:
            tables = read_toml(exhibit.folder / f"{file}.toml")
            every, sweep = cells(tables, scale, [*part.set, *always, *sets])
            chosen = tuple(c for c in every if fits(flatten(c.experiment.tables()), exhibit.where))
            known = cost(exhibit, file, part, scale)
            place = out / exhibit.paper / file
            if chosen:
                found.append(Piece(part, file, chosen, sweep, place, known.seconds if known else None))
    return found


def reduced(exhibit: Exhibit, pieces: Sequence[Piece]) -> str:
    """In which sizes the runs differ from those that the scale paper has, in words; empty if in none."""
    found: dict[str, tuple[set[int], set[int]]] = {}
    for piece in pieces:
        whole, _ = cells(read_toml(exhibit.folder / f"{piece.file}.toml"), "paper", piece.part.set)
        theirs = [c for c in whole if fits(flatten(c.experiment.tables()), exhibit.where)]
        for what, (mine, paper) in _sizes(piece.every, theirs).items():
            ours, others = found.setdefault(what, (set(), set()))
            ours |= mine
            others |= paper
    words = [f"{_span(a)} {what} ({_span(b)})" for what, (a, b) in found.items() if a != b]
    return ", ".join(words)


def _sizes(mine: Sequence[Cell], paper: Sequence[Cell]) -> dict[str, tuple[set[int], set[int]]]:
    measures: dict[str, Callable[[Sequence[Cell]], set[int]]] = {
        "rounds": lambda every: {c.experiment.schedule.rounds for c in every},
        "seeds": lambda every: {len({c.seed for c in every})},
        "clients": lambda every: {int(flatten(c.experiment.tables()).get("data.clients") or 0) for c in every},
        "samples of a client at most": lambda every: {
            int(flatten(c.experiment.tables()).get("data.most") or 0) for c in every
        },
    }
    return {what: (measure(mine), measure(paper)) for what, measure in measures.items()}


def _span(numbers: set[int]) -> str:
    shown = sorted(numbers - {0})
    if not shown:
        return "all"
    return str(shown[0]) if len(shown) == 1 else f"{shown[0]} to {shown[-1]}"


def estimate(exhibit: Exhibit, scale: str, jobs: int = 2) -> float | None:
    """Seconds that all of it takes with so many runs at a time; None where a file was never measured."""
    total = 0.0
    for part in exhibit.parts:
        for file in part.files:
            known = cost(exhibit, file, part, scale)
            if known is None:
                return None
            total += known.runs * known.seconds
    return total / jobs


def status(exhibit: Exhibit, missing: Sequence[str], subsets: Sequence[str]) -> str:
    """What of it can be run here, in a few words."""
    if exhibit.why:
        return "nothing to run"
    if missing:
        return f"needs data: {', '.join(missing)}"
    if (estimate(exhibit, "paper") or 0) > LONG:
        return "in full it needs a GPU; small runs here"
    return "on a subset" if exhibit.lacks or subsets else "in full"


class Overall:
    """How far many runs are, by the rounds that their logs show."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.left: list[tuple[Cell, Path, float]] = []
        for piece in pieces:
            for cell in piece.every if not piece.sweep.tune else {*piece.trials(), *piece.wanted()}:
                weight = cell.experiment.schedule.rounds if piece.seconds is None else piece.seconds
                self.left.append((cell, piece.folder, weight))
        self.total = sum(weight for _, _, weight in self.left)
        self.done = 0.0

    def look(self) -> float:
        """The part that is done, in the units of `total`."""
        still, begun = [], 0.0
        for cell, folder, weight in self.left:
            if cell.done(folder) or cell.failed(folder):
                self.done += weight
            else:
                still.append((cell, folder, weight))
                begun += weight * rounds_of(cell.folder(folder)) / cell.experiment.schedule.rounds
        self.left = still
        return self.done + begun


def rounds_of(folder: Path) -> int:
    """How many rounds a run has done."""
    try:
        return RunFolder(folder).timings.read_bytes().count(b"\n")
    except OSError:
        return 0


def execute(pieces: Sequence[Piece], data: Path | None, at_a_time: int, told: jobs.Told) -> None:
    for piece in pieces:
        if piece.sweep.tune:
            jobs.execute(piece.trials(), piece.folder, data, at_a_time, told)
        jobs.execute(piece.wanted(), piece.folder, data, at_a_time, told)


def finished(pieces: Sequence[Piece]) -> dict[str, list[Run]]:
    """The runs that are done, by the name of the part."""
    found: dict[str, list[Run]] = {}
    for piece in pieces:
        done = [cell.folder(piece.folder) for cell in piece.wanted() if cell.done(piece.folder)]
        found.setdefault(piece.part.name, []).extend(find_runs(done) if done else [])
    return found


@dataclass(frozen=True)
class Entry:
    """A place in a table: our runs' figure, and the paper's."""

    ours: float | None
    spread: float | None
    "standard deviation over seeds, where there are several"
    seeds: int
    paper: float | None = None
    paper_spread: float | None = None

    @property
    def mark(self) -> str:
        """Do the two differ by more than both deviations together? Where neither is known, nobody can tell."""
        if self.ours is None or self.paper is None or (self.spread is None and self.paper_spread is None):
            return ""
        if abs(self.ours - self.paper) <= (self.spread or 0) + (self.paper_spread or 0):
            return ""
        return "▲" if self.ours > self.paper else "▼"


@dataclass(frozen=True)
class Beside:
    """A table of ours beside the paper's."""

    title: str
    unit: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    entries: tuple[tuple[Entry, ...], ...]

    @property
    def digits(self) -> int:
        return 2 if self.unit in ("%", "×") else 4

    def text(self, entry: Entry) -> str:
        def figure(value: float | None, spread: float | None) -> str:
            deviation = "" if spread is None else f" ± {spread:.{self.digits}f}"
            return "–" if value is None else f"{value:.{self.digits}f}{deviation}"

        published = "" if entry.paper is None else f" ({figure(entry.paper, entry.paper_spread)})"
        return f"{figure(entry.ours, entry.spread)}{published} {entry.mark}".strip()

    def marked(self) -> int:
        return sum(bool(entry.mark) for row in self.entries for entry in row)

    def filled(self) -> int:
        return sum(entry.ours is not None and entry.paper is not None for row in self.entries for entry in row)

    def as_json(self) -> dict[str, Any]:
        entries = [[{**asdict(entry), "mark": entry.mark} for entry in row] for row in self.entries]
        return {**asdict(self), "entries": entries, "digits": self.digits}


def score(run: Run, kind: str, moment: str) -> float | None:
    """Of the kind of model that is asked for; else of the personal one, if there is one, else of the global one."""
    metric = run.summary["metric"]
    scale = 100 if metric == "accuracy" else 1
    scores: Mapping[str, Any] = run.summary
    if kind == "unseen":
        scores, kind = run.summary.get("unseen", {}), ""
    kind = kind or next((k for k in ("personal", "global") if k in scores), "")
    if moment == "validation" and scores is run.summary:
        scores = _best_on_validation(run, kind) or scores
    value = scores.get(kind, {}).get(metric)
    return None if value is None else scale * float(value)


def _best_on_validation(run: Run, kind: str) -> dict[str, Any] | None:
    metric = run.summary["metric"]
    field = f"validation_{metric}"
    lines = [line for line in run.metrics if line.get(kind, {}).get(field) is not None]
    if not lines:
        return None
    return (max if metric == "accuracy" else min)(lines, key=lambda line: line[kind][field])


def seconds_to(run: Run, target: float) -> float | None:
    """Of training, to the first evaluation that reached the score."""
    kind = "personal" if "personal" in run.summary else "global"
    metric = run.summary["metric"]
    reached = next((line["round"] for line in run.metrics if (line.get(kind, {}).get(metric) or 0) >= target), None)
    if reached is None:
        return None
    timings = map(json.loads, RunFolder(run.path).timings.read_text().splitlines())
    return float(sum(line["train"] for line in timings if line["round"] <= reached))


def beside(exhibit: Exhibit, runs: Mapping[str, list[Run]], scale: str) -> list[Beside]:
    """Our figures beside the paper's: one table, or one a part."""
    if not exhibit.rows:
        return []
    if exhibit.joint:
        columns = [column for column in exhibit.columns if column.part in runs]
        every = [run for part in runs.values() for run in part]
        owner = {id(run): part for part, some in runs.items() for run in some}
        return [_table(exhibit, exhibit.title, columns, every, owner, exhibit.published(), scale)]
    tables = []
    for part, some in runs.items():
        title = f"{exhibit.title}: {part}" if len(exhibit.parts) > 1 else exhibit.title
        tables.append(_table(exhibit, title, exhibit.columns, some, {}, exhibit.published(part), scale))
    return tables


def _table(
    exhibit: Exhibit,
    title: str,
    columns: Sequence[Line],
    runs: list[Run],
    owner: Mapping[int, str],
    published: Mapping[str, list[Figure]],
    scale: str,
) -> Beside:
    body, labels = [], []
    for row in exhibit.rows:
        entries = []
        for column in columns:
            mine = [
                run
                for run in runs
                if fits(run.config, {**row.where, **column.where}) and owner.get(id(run), "") == column.part
            ]
            at = exhibit.columns.index(column)
            entries.append(_entry(exhibit, row, column, mine, published.get(row.key), at, scale))
        if any(entry.ours is not None for entry in entries):
            body.append(tuple(entries))
            labels.append(row)
    if exhibit.relative:
        body = _divided(body, [line.key for line in labels].index(exhibit.relative)) if _has(labels, exhibit) else []
    metric = runs[0].summary["metric"] if runs else "accuracy"
    unit = "×" if exhibit.relative else "%" if metric == "accuracy" else metric
    return Beside(
        title, unit, tuple(line.label for line in labels if body), tuple(c.label for c in columns), tuple(body)
    )


def _has(labels: Sequence[Line], exhibit: Exhibit) -> bool:
    return any(line.key == exhibit.relative for line in labels)


def _entry(
    exhibit: Exhibit, row: Line, column: Line, runs: list[Run], published: list[Figure] | None, at: int, scale: str
) -> Entry:
    kind = row.score or column.score or exhibit.score
    if exhibit.target:
        found = [seconds_to(run, exhibit.target[scale]) for run in runs]
    else:
        found = [score(run, kind, exhibit.moment) for run in runs]
    values = [value for value in found if value is not None]
    paper = published[at] if published is not None and at < len(published) else (None, None)
    deviation = stdev(values) if len(values) > 1 else None
    return Entry(mean(values) if values else None, deviation, len(values), *paper)


def _divided(body: list[tuple[Entry, ...]], by: int) -> list[tuple[Entry, ...]]:
    """Every figure relative to that of one row, ours to ours and the paper's to the paper's."""

    def over(a: float | None, b: float | None) -> float | None:
        return None if a is None or not b else a / b

    return [
        tuple(
            replace(e, ours=over(e.ours, r.ours), spread=over(e.spread, r.ours), paper=over(e.paper, r.paper))
            for e, r in zip(row, body[by], strict=True)
        )
        for row in body
    ]


def draw(exhibit: Exhibit, runs: Mapping[str, list[Run]], scale: str, out: Path, data: Path | None) -> list[Path]:
    """Its pictures: one a part, and one for each combination of the settings that are kept apart."""
    found = []
    for part, some in runs.items():
        apart: dict[str, list[Run]] = {}
        for run in some:
            name = "-".join(str(run.config[key]) for key in exhibit.each if key in run.config)
            apart.setdefault(name, []).append(run)
        for name, mine in apart.items():
            words = [exhibit.name, part, name, scale]
            path = out / exhibit.paper / ("-".join(word for word in words if word) + ".png")
            if exhibit.plot == "cka":
                from equipoise.runs import reopen
                from equipoise.similarity import measure

                alike = [(run, reopen(run.path, data)[0].simulation) for run in mine]
                compared = [measure(s, run.path.name, _CKA_SAMPLES, lambda done, total: None) for run, s in alike]
                for similarity, run in zip(compared, mine, strict=True):
                    similarity.write(run.path)
                plots.draw_similarity(compared, path)
            else:
                plots.draw(exhibit.plot, mine, path)
            found.append(path)
    return found


def keep(exhibit: Exhibit, tables: Sequence[Beside], scale: str, out: Path) -> None:
    """The tables for `equipoise report`, under the exhibit's name, beside those of others and of other parts."""
    path, name = out / exhibit.paper / PAPER, f"{exhibit.id} ({scale})"
    kept: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    kept[name] = kept.get(name, {}) | {table.title: table.as_json() for table in tables}
    files.make_folder(path.parent)
    files.write_json(path, kept)
