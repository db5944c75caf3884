"""The command `equipoise reproduce`."""

import shlex
import threading
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from equipoise.cli.console import Data, Sets, err_console, interrupted
from equipoise.cli.reproduce_output import print_differences, print_exhibits, print_json, print_plan, print_tables, say
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
    scale: Annotated[Scale, typer.Option("--scale", help="Size of the runs.")] = Scale.small,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, max=1000, help="Number of seeds, counted from 0.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=256, help="Number of runs at a time.")] = 1,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all runs.")] = Path("runs"),
    data: Data = None,
    sets: Sets = None,
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
        equipoise reproduce flame-table3 --plan              list the runs it would start
        equipoise reproduce flame-table3 --only fashion-mnist --jobs 2
        equipoise reproduce learn2pfed-table1 --scale paper --jobs 2
        equipoise report runs --out report.html              write the same as a page

    Scales: smoke shows in a minute or two that everything works; small is made for two cores and takes minutes to
    hours; paper has the paper's own rounds, clients and seeds. Finished runs are used again, whichever table needs
    them. After an interruption the same command resumes at the last complete round.

    ▲ and ▼ mark where our mean is above or below the paper's figure by more than both standard deviations together.
    Figures of runs with fewer rounds, clients or samples than the paper's, or with other settings, are not marked.
    """
    from equipoise.reproduction import exhibits
    from equipoise.reproduction import runner as work
    from equipoise.reproduction.comparison import compare_with_paper
    from equipoise.reproduction.scale_differences import cut_runs
    from equipoise.storage.run_folder import ASIDE

    place = papers or exhibits.own()
    if name is None:
        for option, given in (("--only", only), ("--seeds", seeds), ("--set", sets), ("--plan", plan)):
            if given:
                raise EquipoiseError(f"{option} is for one table or figure; name it, such as flame-table3")
        print_exhibits(place, data, as_json)
        return
    exhibit = exhibits.find(name, place)
    if exhibit.why:
        raise EquipoiseError(f"{name} ({exhibit.title}) cannot be run: {exhibit.why}")
    pieces = work.pieces(exhibit, out, scale.value, only or [], seeds, sets or [])
    if not pieces:
        raise EquipoiseError(f"{name} has no runs at the scale {scale.value} with these settings")
    if plan:
        print_plan(exhibit, pieces, scale.value, jobs, as_json)
        return
    _need(exhibit, exhibit.chosen(only or []), data)
    try:
        _execute(exhibit, pieces, data, jobs, quiet)
    except (Interrupted, KeyboardInterrupt):
        again = ["equipoise", "reproduce", name, *(x for part in only or [] for x in ("--only", part))]
        again += ["--scale", scale.value, *(["--seeds", str(seeds)] if seeds else []), "--jobs", str(jobs)]
        again += ["--out", str(out), *(["--data", str(data)] if data else [])]
        again += [*(["--papers", str(papers)] if papers else []), *(x for s in sets or [] for x in ("--set", s))]
        interrupted("stopped; all complete rounds are saved", shlex.join(again))
    runs = work.finished(pieces)
    tables = compare_with_paper(exhibit, runs, scale.value, cut_runs(exhibit, pieces))
    pictures = work.draw(exhibit, runs, scale.value, out, data) if exhibit.plot else []
    if as_json:
        print_json(tables, runs, pictures)
    else:
        print_tables(exhibit, tables, [run for part in runs.values() for run in part])
        print_differences(exhibit, pieces, scale.value)
    for picture in pictures:
        say(f"Picture: {picture}", as_json)
    say(
        f"Runs: {out / exhibit.paper}; as a page: equipoise report {out / exhibit.paper} --out report.html",
        as_json,
    )
    if all(item.startswith(ASIDE) for item in sets or []):  # with other settings it is another experiment
        work.keep(exhibit, out, scale.value, seeds)
    failed = [c.folder(p.folder) for p in pieces for c in p.wanted() if c.failed(p.folder)]
    if failed:
        raise RunFailed(f"{len(failed)} runs failed, the first in {failed[0]}; its failed.json says why")


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

    def report(cell: "SweepRun", notes: list[str]) -> None:
        for note in notes:
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
