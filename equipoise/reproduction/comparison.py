"""Comparison of our figures with those of a paper: the runs of each table cell, and the differences."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from equipoise.reproduction.exhibits import Exhibit, Figure, Line
from equipoise.storage.result_records import TRAINING_SECONDS
from equipoise.storage.run_folder import RunFolder
from equipoise.storage.run_index import FinishedRun, higher_is_better


def fits(config: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Tell whether a configuration has these values; 1 equals 1.0, because people write either in TOML.

    An empty list also fits a configuration without the setting, as it does in views of results.
    """
    return all(config.get(key, [] if value == [] else None) == value for key, value in where.items())


@dataclass(frozen=True)
class ComparisonCell:
    """A cell of a table: the figure of our runs, and the paper's."""

    ours: float | None
    spread: float | None
    "standard deviation over seeds, if there are several"
    seeds: int
    paper: float | None = None
    paper_spread: float | None = None
    cut: bool = False
    "whether a run was smaller than the paper's, or otherwise different, so that a difference says nothing"

    @property
    def mark(self) -> str:
        """Return ▲ or ▼ if our figure is above or below the paper's by more than both deviations together.

        If neither deviation is known, or the runs are not the paper's, there is no mark.
        """
        if self.cut or self.ours is None or self.paper is None or (self.spread is None and self.paper_spread is None):
            return ""
        if abs(self.ours - self.paper) <= (self.spread or 0) + (self.paper_spread or 0):
            return ""
        return "▲" if self.ours > self.paper else "▼"


@dataclass(frozen=True)
class PaperComparison:
    """A table of our figures and the paper's."""

    title: str
    unit: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    entries: tuple[tuple[ComparisonCell, ...], ...]

    @property
    def digits(self) -> int:
        """Return the number of decimals."""
        return 2 if self.unit in ("%", "×") else 4

    def text(self, entry: ComparisonCell) -> str:
        """Return a cell as text: our figure, the paper's in parentheses, and the mark."""

        def figure(value: float | None, spread: float | None) -> str:
            deviation = "" if spread is None else f" ± {spread:.{self.digits}f}"
            return "–" if value is None else f"{value:.{self.digits}f}{deviation}"

        published = "" if entry.paper is None else f" ({figure(entry.paper, entry.paper_spread)})"
        return f"{figure(entry.ours, entry.spread)}{published} {entry.mark}".strip()

    def marked(self) -> int:
        """Return the number of cells with a mark."""
        return sum(bool(entry.mark) for row in self.entries for entry in row)

    def filled(self) -> int:
        """Return the number of cells with both figures."""
        return sum(entry.ours is not None and entry.paper is not None for row in self.entries for entry in row)

    def cut(self) -> int:
        """Return the number of cells with both figures whose runs are not the paper's."""
        return sum(
            entry.cut and entry.ours is not None and entry.paper is not None for row in self.entries for entry in row
        )

    def as_json(self) -> dict[str, Any]:
        """Return the table as plain data."""
        entries = [[{**asdict(entry), "mark": entry.mark} for entry in row] for row in self.entries]
        return {**asdict(self), "entries": entries, "digits": self.digits}


def score(run: FinishedRun, kind: str, moment: str) -> float | None:
    """Return the test score of a run, accuracies in %.

    Args:
        run: the run.
        kind: kind of model, or "unseen"; empty for the personal model, or the global one if there is none.
        moment: the evaluation that counts: "end", or "validation" for the one that was best on validation samples.
    """
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


def _best_on_validation(run: FinishedRun, kind: str) -> dict[str, Any] | None:
    metric = run.summary["metric"]
    field = f"validation_{metric}"
    lines = [line for line in run.metrics if line.get(kind, {}).get(field) is not None]
    if not lines:
        return None
    return (max if higher_is_better(run.summary) else min)(lines, key=lambda line: line[kind][field])


def seconds_to(run: FinishedRun, target: float) -> float | None:
    """Return the seconds of training until the first evaluation that reached a score, or None if none did."""
    kind = "personal" if "personal" in run.summary else "global"
    sign = 1 if higher_is_better(run.summary) else -1
    for line in run.metrics:
        score = line.get(kind, {}).get(run.summary["metric"])
        if score is not None and sign * score >= sign * target:
            if TRAINING_SECONDS in line:  # a recorded run
                return float(line[TRAINING_SECONDS])
            folder = RunFolder(run.path)
            return float(sum(t["train"] for t in folder.read(folder.timings) if t["round"] <= line["round"]))
    return None


def compare_with_paper(
    exhibit: Exhibit, runs: Mapping[str, list[FinishedRun]], scale: str, cut: Collection[Path] = ()
) -> list[PaperComparison]:
    """Return our figures and the paper's: one table, or one per part.

    Args:
        exhibit: the table or figure of the paper.
        runs: our finished runs, by the name of the part.
        scale: the scale of the runs, which decides the target score of exhibits that measure time.
        cut: folders of the runs that differ from the paper's, whose figures are not marked.
    """
    if not exhibit.rows:
        return []
    if exhibit.joint:
        columns = [column for column in exhibit.columns if column.part in runs]
        every = [run for part in runs.values() for run in part]
        owner = {id(run): part for part, some in runs.items() for run in some}
        return [_table(exhibit, exhibit.title, columns, every, owner, exhibit.published(), scale, cut)]
    tables = []
    for part, some in runs.items():
        title = f"{exhibit.title}: {part}" if len(exhibit.parts) > 1 else exhibit.title
        tables.append(_table(exhibit, title, exhibit.columns, some, {}, exhibit.published(part), scale, cut))
    return tables


def _table(
    exhibit: Exhibit,
    title: str,
    columns: Sequence[Line],
    runs: list[FinishedRun],
    owner: Mapping[int, str],
    published: Mapping[str, list[Figure]],
    scale: str,
    cut: Collection[Path],
) -> PaperComparison:
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
            entry = _entry(exhibit, row, column, mine, published.get(row.key), at, scale)
            entries.append(replace(entry, cut=any(run.path in cut for run in mine)))
        if any(entry.ours is not None for entry in entries):
            body.append(tuple(entries))
            labels.append(row)
    if exhibit.relative:
        body = _divided(body, [line.key for line in labels].index(exhibit.relative)) if _has(labels, exhibit) else []
    metric = runs[0].summary["metric"] if runs else "accuracy"
    unit = "×" if exhibit.relative else "%" if metric == "accuracy" else metric
    return PaperComparison(
        title, unit, tuple(line.label for line in labels if body), tuple(c.label for c in columns), tuple(body)
    )


def _has(labels: Sequence[Line], exhibit: Exhibit) -> bool:
    return any(line.key == exhibit.relative for line in labels)


def _entry(
    exhibit: Exhibit,
    row: Line,
    column: Line,
    runs: list[FinishedRun],
    published: list[Figure] | None,
    at: int,
    scale: str,
) -> ComparisonCell:
    kind = row.score or column.score or exhibit.score
    if exhibit.target:
        found = [seconds_to(run, exhibit.target[scale]) for run in runs]
    else:
        found = [score(run, kind, exhibit.moment) for run in runs]
    values = [value for value in found if value is not None]
    paper = published[at] if published is not None and at < len(published) else (None, None)
    deviation = stdev(values) if len(values) > 1 else None
    return ComparisonCell(mean(values) if values else None, deviation, len(values), *paper)


def _divided(body: list[tuple[ComparisonCell, ...]], by: int) -> list[tuple[ComparisonCell, ...]]:
    """Divide every figure by that of one row, ours by ours and the paper's by the paper's."""

    def over(a: float | None, b: float | None) -> float | None:
        return None if a is None or not b else a / b

    return [
        tuple(
            replace(
                e,
                ours=over(e.ours, r.ours),
                spread=over(e.spread, r.ours),
                paper=over(e.paper, r.paper),
                cut=e.cut or r.cut,
            )
            for e, r in zip(row, body[by], strict=True)
        )
        for row in body
    ]
