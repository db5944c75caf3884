"""What `equipoise reproduce` prints: the list of tables and figures, plans, and results beside the paper."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from equipoise.cli.console import err_console, out_console
from equipoise.reporting.fitted_table import FittedTable

if TYPE_CHECKING:
    from equipoise.reproduction.comparison import PaperComparison
    from equipoise.reproduction.exhibits import Exhibit
    from equipoise.reproduction.pieces import Piece
    from equipoise.storage.run_index import FinishedRun


def say(text: str, aside: bool) -> None:
    """Print a sentence; on the error stream where standard output is for programs."""
    (err_console if aside else out_console).print(escape(text), highlight=False, soft_wrap=True)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (129_600, "h", 3600)):
        if seconds < limit:
            return f"{max(1, round(seconds / size))} {unit}"
    return f"{round(seconds / 86_400)} days"


def print_exhibits(place: Path, data: Path | None, as_json: bool) -> None:
    from equipoise.data.catalogue import entry
    from equipoise.data.sources import data_folder
    from equipoise.reproduction import exhibits
    from equipoise.reproduction import runner as work
    from equipoise.reproduction.published import count_published

    folder = data_folder(data)
    every = list(exhibits.exhibits(place).values())
    states = {name: entry(name, folder).state for exhibit in every for name in exhibit.data()}
    here: dict[str, str] = {}
    times: dict[str, dict[str, float | None]] = {}
    for exhibit in every:
        of = {state: [n for n in exhibit.data() if states[n] in words] for state, words in _DATA_STATES.items()}
        times[exhibit.id] = {s: work.estimate(exhibit, s) if exhibit.parts else None for s in exhibits.SCALES}
        here[exhibit.id] = work.status(exhibit, of["missing"], of["subset"], times[exhibit.id]["paper"])
    published = {exhibit.id: count_published(exhibit) for exhibit in every}
    if as_json:
        rows = [
            {
                "name": e.id,
                "title": e.title,
                "status": here[e.id],
                "differs": e.differs,
                "parts": [part.name for part in e.parts],
                "data": {name: states[name] for name in e.data()},
                "seconds": times[e.id],
                "published": published[e.id],
            }
            for e in every
        ]
        print(json.dumps(rows, indent=2))
        return
    recorded = any(published.values())
    for paper, about in exhibits.papers(place).items():
        body = []
        for exhibit in (e for e in every if e.paper == paper):
            what = exhibit.title + (f" ({exhibit.differs})" if exhibit.differs else "")
            needs = [name + _DATA_NOTES.get(states[name], "") for name in exhibit.data()]
            spent = [_duration(times[exhibit.id][s]) if exhibit.parts else "" for s in ("small", "paper")]
            kept = ", ".join(
                f"{scale}: {number} run{'s' if number > 1 else ''}" for scale, number in published[exhibit.id].items()
            )
            body.append([exhibit.id, what, here[exhibit.id], ", ".join(needs), *spent, *([kept] if recorded else [])])
        words = ["name", "what", "here", "data"]
        head = [*words, "small", "paper", *(["published"] if recorded else [])]
        out_console.print(FittedTable(head, body, words=words, secondary=["data"], title=about), "", sep="")
    say(
        "small, paper: time at that scale with --jobs 2, on the two cores where experiments/times.json was measured. "
        + ("published: recorded results, which `equipoise reproduce NAME --published` shows. " if recorded else "")
        + "Next: `equipoise reproduce NAME --plan`; `equipoise data get NAME` downloads missing data.",
        False,
    )


_DATA_STATES = {"missing": ("missing", "damaged"), "subset": ("subset", "bundled")}


_DATA_NOTES = {"subset": " (a part)", "bundled": " (a part)", "missing": " (missing)", "damaged": " (damaged)"}


def as_plain(
    tables: "list[PaperComparison]", runs: "dict[str, list[FinishedRun]]", pictures: list[Path]
) -> dict[str, Any]:
    """Return the results of an exhibit as plain data, for JSON."""
    from equipoise.reporting import comparison

    rows = {part: comparison.compare(some) for part, some in runs.items() if some}
    return {"tables": [table.as_json() for table in tables], "runs": rows, "pictures": list(map(str, pictures))}


def print_plan(exhibit: "Exhibit", pieces: "list[Piece]", scale: str, jobs: int, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "part": piece.part.name,
                "file": piece.file,
                "runs": len(piece.planned()),
                "done": sum(map(piece.results.done, piece.planned())),
                "seconds_a_run": piece.seconds,
            }
            for piece in pieces
        ]
        print(json.dumps(rows, indent=2))
        return
    body = []
    for piece in pieces:
        planned = piece.planned()
        done = sum(map(piece.results.done, planned))
        rounds = sorted({cell.experiment.schedule.rounds for cell in planned})
        left = None if piece.seconds is None else (len(planned) - done) * piece.seconds / jobs
        shown = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
        body.append([piece.part.name, f"{piece.file}.toml", str(len(planned)), str(done), shown, _duration(left)])
    head = ["part", "file", "runs", "done", "rounds", f"time, {jobs} at a time"]
    out_console.print(FittedTable(head, body, words=["part", "file"], title=f"{exhibit.id}: {exhibit.title}"))
    print_differences(exhibit, pieces, scale)
    say(f"Runs go to {pieces[0].folder.parent}.", False)


def print_tables(exhibit: "Exhibit", tables: "list[PaperComparison]", runs: "list[FinishedRun]") -> None:
    from equipoise.reporting import comparison, comparison_table

    for paper_table in tables:
        unit = {"%": ", accuracy in %", "×": ""}.get(paper_table.unit, f", {paper_table.unit}")
        body = [
            [label, *map(paper_table.text, entries)]
            for label, entries in zip(paper_table.rows, paper_table.entries, strict=True)
        ]
        title = f"{exhibit.id}: {paper_table.title}{unit}"
        out_console.print(FittedTable(["", *paper_table.columns], body, words=[""], title=title, split=True))
        if not paper_table.rows:
            say("No part of this table has been run at this scale.", False)
    if tables:
        say(_about_marks(tables), False)
    elif runs:
        out_console.print(comparison_table.as_table(comparison.compare(runs)))
        if exhibit.shown:
            out_console.print(_figures(exhibit, runs))


def _about_marks(tables: "list[PaperComparison]") -> str:
    """Return what the marks mean, and why figures have none."""
    marked, filled, cut = (
        sum(count) for count in zip(*((t.marked(), t.filled(), t.cut()) for t in tables), strict=True)
    )
    own = "their runs have other sizes or settings than the paper's, so a difference says nothing; try --scale paper"
    if cut and cut == filled:
        return f"In parentheses: the paper's. No figure is marked ▲ or ▼: {own}."
    several = any(e.seeds > 1 for t in tables for row in t.entries for e in row)
    spread = "" if several else " With one seed our own spread is unknown; --seeds 5 shows it."
    without = f" Not marked: {cut} of {filled} figures, because {own}." if cut else ""
    return (
        f"In parentheses: the paper's. ▲ ▼: ours is above or below it by more than both standard deviations "
        f"together, {marked} of {filled - cut} figures.{without}{spread}"
    )


def print_differences(exhibit: "Exhibit", pieces: "list[Piece]", scale: str) -> None:
    """Say how the runs differ from the paper's, so that nobody mistakes one for the other."""
    from equipoise.reproduction.scale_differences import reduced

    if sizes := reduced(exhibit, pieces):
        say(f"Scale {scale} (in parentheses: paper): {sizes}.", False)
    if exhibit.differs:
        say(f"Different from the paper: {exhibit.differs}.", False)


def _figures(exhibit: "Exhibit", runs: "list[FinishedRun]") -> FittedTable:
    """Return a table of other figures of the summaries, for exhibits that are about them."""
    from equipoise.reporting import comparison
    from equipoise.storage import run_index

    body = []
    for row, group in zip(comparison.compare(runs), run_index.grouped(runs), strict=True):
        values = [group[0].summary.get(field) for field in exhibit.shown.values()]
        body.append([row["algorithm"], row["settings"], *("–" if v is None else f"{v:,}" for v in values)])
    words = ["algorithm", "settings"]
    return FittedTable([*words, *exhibit.shown], body, words=words, split=True)
