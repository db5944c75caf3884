"""The command `equipoise reproduce`."""

import json
import shlex
import threading
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from equipoise.cli.console import Data, Sets, err_console, interrupted
from equipoise.cli.reproduce_output import as_plain, print_differences, print_exhibits, print_plan, print_tables, say
from equipoise.cli.reproduce_published import show_published
from equipoise.errors import EquipoiseError, Interrupted, RunFailed

if TYPE_CHECKING:
    from equipoise.reproduction.exhibits import Exhibit, ExhibitPart
    from equipoise.reproduction.pieces import Piece
    from equipoise.runs.sweep import SweepRun

_UPDATE_EVERY = 1.0  # seconds


class Scale(StrEnum):
    smoke = "smoke"
    small = "small"
    paper = "paper"


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A table or a figure, such as flame-table3.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PART", help="Run only this part, such as fashion-mnist.")
    ] = None,
    scale: Annotated[Scale | None, typer.Option("--scale", help="Size of the runs; default: small.")] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, max=1000, help="Number of seeds, counted from 0.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=256, help="Number of runs at a time.")] = 1,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all runs.")] = Path("runs"),
    data: Data = None,
    sets: Sets = None,
    published: Annotated[
        bool, typer.Option("--published", help="Show the recorded results; nothing is run, and no data are needed.")
    ] = False,
    continued: Annotated[
        bool, typer.Option("--continue", help="Take the recorded runs as done, and run only the others.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Only list the runs that would be started.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    papers: Annotated[
        Path | None,
        typer.Option("--papers", metavar="DIR", help="Folder with papers of your own (see docs/reproduce.md)."),
    ] = None,
) -> None:
    """Run a table or a figure of a paper, and print the results beside those of the paper.

    \b
        equipoise reproduce                                  list what there is, what it needs, how long it takes
        equipoise reproduce flame-table3 --published         show the recorded results, without running anything
        equipoise reproduce flame-table3 --plan              list the runs it would start
        equipoise reproduce flame-table3 --only fashion-mnist --jobs 2
        equipoise reproduce learn2pfed-table1 --scale paper --jobs 2
        equipoise report runs --out report.html              write the same as a page

    Scales: smoke shows in a minute or two that everything works; small is made for two cores and takes minutes to
    hours; paper has the paper's own rounds, clients and seeds. Finished runs are used again, whichever table needs
    them. After an interruption the same command resumes at the last complete round. Results that come with the package
    are runs of other machines: --published shows them, and --continue runs only what they lack.

    ▲ and ▼ mark where our mean is above or below the paper's figure by more than both standard deviations together.
    Figures of runs with fewer rounds, clients or samples than the paper's, or with other settings, are not marked.
    """
    from equipoise.reproduction import exhibits
    from equipoise.reproduction import runner as work
    from equipoise.reproduction.comparison import compare_with_paper
    from equipoise.reproduction.published import can_draw, read_recorded
    from equipoise.reproduction.scale_differences import cut_runs
    from equipoise.storage.run_folder import ASIDE

    place = papers or exhibits.own()
    if name is None:
        given_options = [("--only", only), ("--seeds", seeds), ("--set", sets), ("--plan", plan)]
        for option, given in [*given_options, ("--published", published), ("--continue", continued)]:
            if given:
                raise EquipoiseError(f"{option} is for one table or figure; name it, such as flame-table3")
        print_exhibits(place, data, as_json)
        return
    exhibit = exhibits.find(name, place)
    if exhibit.why:
        raise EquipoiseError(f"{name} ({exhibit.title}) cannot be run: {exhibit.why}")
    if published:
        for option, given in (("--set", sets), ("--plan", plan), ("--continue", continued)):
            if given:
                raise EquipoiseError(f"{option} is about runs, but --published runs nothing; leave one of them out")
        show_published(exhibit, scale.value if scale else None, only or [], seeds, out, as_json)
        return
    size = (scale or Scale.small).value
    records = read_recorded(exhibit) if continued and can_draw(exhibit) else None
    pieces = work.pieces(exhibit, out, size, only or [], seeds, sets or [], records)
    if not pieces:
        raise EquipoiseError(f"{name} has no runs at the scale {size} with these settings")
    if plan:
        print_plan(exhibit, pieces, size, jobs, as_json)
        return
    _say_what_is_recorded(pieces, as_json)
    if any(not piece.over(cell) for piece in pieces for cell in piece.planned()):
        _need(exhibit, exhibit.chosen(only or []), data)
    try:
        _execute(exhibit, pieces, data, jobs, quiet)
    except (Interrupted, KeyboardInterrupt):
        again = ["equipoise", "reproduce", name, *(x for part in only or [] for x in ("--only", part))]
        again += ["--scale", size, *(["--seeds", str(seeds)] if seeds else []), "--jobs", str(jobs)]
        again += ["--out", str(out), *(["--data", str(data)] if data else [])]
        again += [*(["--papers", str(papers)] if papers else []), *(x for s in sets or [] for x in ("--set", s))]
        again += ["--continue"] if continued else []
        interrupted("stopped; all complete rounds are saved", shlex.join(again))
    runs = work.finished(pieces)
    tables = compare_with_paper(exhibit, runs, size, cut_runs(exhibit, pieces))
    pictures = work.draw(exhibit, runs, size, out, data) if exhibit.plot else []
    if as_json:
        print(json.dumps(as_plain(tables, runs, pictures), indent=2))
    else:
        print_tables(exhibit, tables, [run for part in runs.values() for run in part])
        print_differences(exhibit, pieces, size)
    for picture in pictures:
        say(f"Picture: {picture}", as_json)
    say(
        f"Runs: {out / exhibit.paper}; as a page: equipoise report {out / exhibit.paper} --out report.html",
        as_json,
    )
    if all(item.startswith(ASIDE) for item in sets or []):  # with other settings it is another experiment
        work.keep(exhibit, out, size, seeds, records)
    failed = [p.results.path(c) for p in pieces for c in p.wanted() if p.results.failed(c)]
    if failed:
        raise RunFailed(f"{len(failed)} runs failed, the first in {failed[0]}; its failed.json says why")


def _say_what_is_recorded(pieces: "list[Piece]", as_json: bool) -> None:
    """Say how many runs are taken from records, so that nobody takes them for runs of this machine."""
    planned = [(piece, cell) for piece in pieces for cell in piece.planned()]
    taken = [(piece, cell) for piece, cell in planned if piece.results.record(cell)]
    if taken:
        versions = sorted({version for piece, cell in taken for version in piece.results.versions([cell])})
        say(
            f"{len(taken)} of {len(planned)} runs are recorded (made by version {', '.join(versions)}) and are not "
            "repeated.",
            as_json,
        )


def _need(exhibit: "Exhibit", parts: "list[ExhibitPart]", data: Path | None) -> None:
    """Raise an error that names all missing data, before anything runs."""
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


def _execute(exhibit: "Exhibit", pieces: "list[Piece]", data: Path | None, jobs: int, quiet: bool) -> None:
    """Run everything, with one progress bar over the rounds of all processes."""
    from equipoise.reproduction import runner as work
    from equipoise.runs.process_pool import unsaid

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
    said: set[str] = set()

    def report(cell: "SweepRun", notes: list[str]) -> None:
        for note in unsaid(notes, said):
            err_console.print(f"equipoise: {escape(note)}", highlight=False)

    def update() -> None:
        progress.update(bar, completed=overall.look(), runs=f"{len(overall.over)} of {overall.count} runs")

    def watch() -> None:
        while not stop.wait(_UPDATE_EVERY):
            update()

    with progress:
        bar = progress.add_task(exhibit.id, total=overall.total, runs="")
        # What was there before must not count as done within the first second.
        update()
        progress.reset(bar, completed=int(overall.look()))
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            work.execute(pieces, data, jobs, report)
        finally:
            stop.set()
            watcher.join()
        update()
