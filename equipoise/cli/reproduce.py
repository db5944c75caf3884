"""The command that runs a table or a figure of a paper."""

import json
import shlex
import threading
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from equipoise.cli.console import Data, Sets, err_console, interrupted, out_console
from equipoise.errors import EquipoiseError, Interrupted, RunFailed

if TYPE_CHECKING:
    from equipoise.reproduction.comparison import PaperComparison
    from equipoise.reproduction.exhibits import Exhibit, ExhibitPart
    from equipoise.reproduction.runner import Piece
    from equipoise.runs.sweep import SweepRun
    from equipoise.storage.run_index import FinishedRun

_LOOK_EVERY = 1.0  # seconds


class Scale(StrEnum):
    smoke = "smoke"
    small = "small"
    paper = "paper"


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A table or a figure, such as flame-table3.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PART", help="Only this part of it, such as fashion-mnist.")
    ] = None,
    scale: Annotated[Scale, typer.Option("--scale", help="How much of it.")] = Scale.small,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, max=1000, help="With so many seeds, from 0 on.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=256, help="Runs at a time.")] = 1,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of all runs.")] = Path("runs"),
    data: Data = None,
    sets: Sets = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    papers: Annotated[
        Path | None, typer.Option("--papers", metavar="DIR", help="A folder of papers of your own (docs/reproduce.md).")
    ] = None,
) -> None:
    """Run a table or a figure of a paper, and print what came out beside what the paper has.

    \b
        equipoise reproduce                                  what there is, what it needs, how long it takes
        equipoise reproduce flame-table3 --plan              which runs that would be
        equipoise reproduce flame-table3 --only fashion-mnist --jobs 2
        equipoise reproduce learn2pfed-table1 --scale paper --jobs 2
        equipoise report runs --out report.html              the same as a page to look at

    Scales: smoke shows in a minute or two that all of it works; small is made for two cores, minutes to hours; paper
    has the paper's own rounds, clients and seeds. What is done stays done, whichever table asks for it again: the same
    command goes on where it was stopped or killed, at the last whole round.

    ▲ and ▼ mark where our mean lies above or below the paper's figure by more than both standard deviations together.
    """
    from equipoise.reproduction import exhibits
    from equipoise.reproduction import runner as work
    from equipoise.reproduction.comparison import compare_with_paper
    from equipoise.storage.run_folder import ASIDE

    place = papers or exhibits.own()
    if name is None:
        for option, given in (("--only", only), ("--seeds", seeds), ("--set", sets), ("--plan", plan)):
            if given:
                raise EquipoiseError(f"{option} is for one table or figure; name it, such as flame-table3")
        _list(place, data, as_json)
        return
    exhibit = exhibits.find(name, place)
    if exhibit.why:
        raise EquipoiseError(f"{name} ({exhibit.title}) is nothing to run: {exhibit.why}")
    pieces = work.pieces(exhibit, out, scale.value, only or [], seeds, sets or [])
    if not pieces:
        raise EquipoiseError(f"{name} has no runs at the scale {scale.value} with these settings")
    if plan:
        _plan(exhibit, pieces, scale.value, jobs, as_json)
        return
    _need(exhibit, exhibit.chosen(only or []), data)
    try:
        _execute(exhibit, pieces, data, jobs, quiet)
    except (Interrupted, KeyboardInterrupt):
        again = ["equipoise", "reproduce", name, *(x for part in only or [] for x in ("--only", part))]
        again += ["--scale", scale.value, *(["--seeds", str(seeds)] if seeds else []), "--jobs", str(jobs)]
        again += ["--out", str(out), *(["--data", str(data)] if data else [])]
        again += [*(["--papers", str(papers)] if papers else []), *(x for s in sets or [] for x in ("--set", s))]
        interrupted("stopped, all whole rounds are saved", shlex.join(again))
    runs = work.finished(pieces)
    tables = compare_with_paper(exhibit, runs, scale.value)
    pictures = work.draw(exhibit, runs, scale.value, out, data) if exhibit.plot else []
    if as_json:
        _print_json(tables, runs, pictures)
    else:
        _show(exhibit, tables, [run for part in runs.values() for run in part])
        _tell_differences(exhibit, pieces, scale.value)
    for picture in pictures:
        _say(f"Picture: {picture}", as_json)
    _say(
        f"Runs: {out / exhibit.paper}; as a page: equipoise report {out / exhibit.paper} --out report.html",
        as_json,
    )
    if all(item.startswith(ASIDE) for item in sets or []):  # with other settings it is another experiment
        work.keep(exhibit, out, scale.value, seeds)
    failed = [c.folder(p.folder) for p in pieces for c in p.wanted() if c.failed(p.folder)]
    if failed:
        raise RunFailed(f"{len(failed)} runs came to nothing, the first in {failed[0]}; its failed.json says why")


def _say(text: str, aside: bool) -> None:
    """For people; where programs read, on the other stream."""
    (err_console if aside else out_console).print(escape(text), highlight=False, soft_wrap=True)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (129_600, "h", 3600)):
        if seconds < limit:
            return f"{max(1, round(seconds / size))} {unit}"
    return f"{round(seconds / 86_400)} days"


def _list(place: Path, data: Path | None, as_json: bool) -> None:
    from equipoise.data.catalogue import entry
    from equipoise.data.sources import data_folder
    from equipoise.reproduction import exhibits
    from equipoise.reproduction import runner as work

    folder = data_folder(data)
    every = list(exhibits.exhibits(place).values())
    states = {name: entry(name, folder).state for exhibit in every for name in exhibit.data()}
    here: dict[str, str] = {}
    times: dict[str, dict[str, float | None]] = {}
    for exhibit in every:
        of = {state: [n for n in exhibit.data() if states[n] in words] for state, words in _STATES.items()}
        times[exhibit.id] = {s: work.estimate(exhibit, s) if exhibit.parts else None for s in exhibits.SCALES}
        here[exhibit.id] = work.status(exhibit, of["missing"], of["subset"], times[exhibit.id]["paper"])
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
            }
            for e in every
        ]
        print(json.dumps(rows, indent=2))
        return
    for paper, about in exhibits.papers(place).items():
        table = Table(title=escape(about), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("name", "what", "here", "data", "small", "paper"):
            table.add_column(column, overflow="fold", justify="right" if column in ("small", "paper") else "left")
        for exhibit in (e for e in every if e.paper == paper):
            what = exhibit.title + (f" ({exhibit.differs})" if exhibit.differs else "")
            needs = [name + _TOLD.get(states[name], "") for name in exhibit.data()]
            spent = [_duration(times[exhibit.id][s]) if exhibit.parts else "" for s in ("small", "paper")]
            table.add_row(exhibit.id, escape(what), here[exhibit.id], ", ".join(needs), *spent)
        out_console.print(table)
    _say(
        "small, paper: time at that scale with --jobs 2 on the two cores that experiments/times.json was measured on. "
        "Next: `equipoise reproduce NAME --plan`; `equipoise data get NAME` fetches data that are missing.",
        False,
    )


_STATES = {"missing": ("missing", "damaged"), "subset": ("subset", "bundled")}
_TOLD = {"subset": " (a part)", "bundled": " (a part)", "missing": " (missing)", "damaged": " (damaged)"}


def _need(exhibit: "Exhibit", parts: "list[ExhibitPart]", data: Path | None) -> None:
    """Data that are missing are named before anything runs, all of them at once."""
    from equipoise.data.catalogue import entry
    from equipoise.data.sources import data_folder

    folder = data_folder(data)
    found = [entry(name, folder) for name in exhibit.data(parts)]
    if missing := [e for e in found if e.state in ("missing", "damaged")]:
        others = [part.name for part in parts if not set(exhibit.data([part])) & {e.name for e in missing}]
        rest = f"; without them: --only {' --only '.join(others)}" if others else ""
        raise EquipoiseError(
            f"{exhibit.id} needs data that are not in {folder}: "
            + ", ".join(f"{e.name} ({e.detail})" for e in missing)
            + rest
        )


def _print_json(tables: "list[PaperComparison]", runs: "dict[str, list[FinishedRun]]", pictures: list[Path]) -> None:
    from equipoise.reporting import comparison

    rows = {part: comparison.compare(some) for part, some in runs.items() if some}
    shown = {"tables": [table.as_json() for table in tables], "runs": rows, "pictures": list(map(str, pictures))}
    print(json.dumps(shown, indent=2))


def _plan(exhibit: "Exhibit", pieces: "list[Piece]", scale: str, jobs: int, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "part": piece.part.name,
                "file": piece.file,
                "runs": len(piece.planned()),
                "done": sum(cell.done(piece.folder) for cell in piece.planned()),
                "seconds_a_run": piece.seconds,
            }
            for piece in pieces
        ]
        print(json.dumps(rows, indent=2))
        return
    table = Table(title=escape(f"{exhibit.id}: {exhibit.title}"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("part", "file", "runs", "done", "rounds", f"time, {jobs} at a time"):
        table.add_column(column, overflow="fold", justify="left" if column in ("part", "file") else "right")
    for piece in pieces:
        planned = piece.planned()
        done = sum(cell.done(piece.folder) for cell in planned)
        rounds = sorted({cell.experiment.schedule.rounds for cell in planned})
        left = None if piece.seconds is None else (len(planned) - done) * piece.seconds / jobs
        shown = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
        table.add_row(piece.part.name, f"{piece.file}.toml", str(len(planned)), str(done), shown, _duration(left))
    out_console.print(table)
    _tell_differences(exhibit, pieces, scale)
    _say(f"Runs go to {pieces[0].folder.parent}.", False)


def _execute(exhibit: "Exhibit", pieces: "list[Piece]", data: Path | None, jobs: int, quiet: bool) -> None:
    """With a bar that shows how far all of it is, by rounds, whichever process does them."""
    from equipoise.reproduction import runner as work

    overall = work.Overall(pieces)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    progress = Progress(
        *columns,
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[runs]}"),
        console=err_console,
        speed_estimate_period=1800,
        disable=quiet,
    )
    stop = threading.Event()

    def told(cell: "SweepRun", notes: list[str]) -> None:
        for note in notes:
            err_console.print(f"equipoise: {escape(note)}", highlight=False)

    def look() -> None:
        progress.update(bar, completed=overall.look(), runs=f"{len(overall.over)} of {overall.count} runs")

    def watch() -> None:
        while not stop.wait(_LOOK_EVERY):
            look()

    with progress:
        bar = progress.add_task(exhibit.id, total=overall.total, runs="")
        # What was there before must not count as done within the first second.
        look()
        progress.reset(bar, completed=int(overall.look()))
        callback = threading.Thread(target=watch, daemon=True)
        callback.start()
        try:
            work.execute(pieces, data, jobs, told)
        finally:
            stop.set()
            callback.join()
        look()


def _show(exhibit: "Exhibit", tables: "list[PaperComparison]", runs: "list[FinishedRun]") -> None:
    from equipoise.reporting import comparison, comparison_table

    for compare_with_paper in tables:
        unit = {"%": ", accuracy in %", "×": ""}.get(compare_with_paper.unit, f", {compare_with_paper.unit}")
        table = Table(
            title=escape(f"{exhibit.id}: {compare_with_paper.title}{unit}"),
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        table.add_column("", overflow="fold")
        for column in compare_with_paper.columns:
            table.add_column(escape(column), justify="right", overflow="fold")
        for label, entries in zip(compare_with_paper.rows, compare_with_paper.entries, strict=True):
            table.add_row(escape(label), *(compare_with_paper.text(entry) for entry in entries))
        out_console.print(table)
        if not compare_with_paper.rows:
            _say("Nothing of this table is done at this scale.", False)
    if tables:
        marked, filled = sum(t.marked() for t in tables), sum(t.filled() for t in tables)
        several = any(e.seeds > 1 for t in tables for row in t.entries for e in row)
        spread = "" if several else " One seed: our own spread is not known; --seeds 5 shows it."
        _say(
            f"In parentheses: the paper's. ▲ ▼: ours is above or below it by more than both standard deviations "
            f"together, {marked} of {filled} figures.{spread}",
            False,
        )
    elif runs:
        out_console.print(comparison_table.as_table(comparison.compare(runs)))
        if exhibit.shown:
            out_console.print(_figures(exhibit, runs))


def _tell_differences(exhibit: "Exhibit", pieces: "list[Piece]", scale: str) -> None:
    """Nobody should read a figure of a small run as one of the paper's experiment."""
    from equipoise.reproduction import runner as work

    if sizes := work.reduced(exhibit, pieces):
        _say(f"Scale {scale} (in parentheses: paper): {sizes}.", False)
    if exhibit.differs:
        _say(f"Other than in the paper: {exhibit.differs}.", False)


def _figures(exhibit: "Exhibit", runs: "list[FinishedRun]") -> Table:
    """What summaries say beside scores, where that is the point."""
    from equipoise.reporting import comparison
    from equipoise.storage import run_index

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("algorithm")
    table.add_column("settings", overflow="fold")
    for column in exhibit.shown:
        table.add_column(column, justify="right")
    for row, group in zip(comparison.compare(runs), run_index.grouped(runs), strict=True):
        values = [group[0].summary.get(field) for field in exhibit.shown.values()]
        table.add_row(row["algorithm"], escape(row["settings"]), *("–" if v is None else f"{v:,}" for v in values))
    return table
