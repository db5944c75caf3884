"""The command line."""

import json
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from equipoise.cli.cka import cka
from equipoise.cli.console import Bar, Data, Out, Sets, interrupted, out_console, progress_bar
from equipoise.cli.data import data_app, show
from equipoise.cli.deploy import deploy_app
from equipoise.cli.report import finished, report
from equipoise.cli.reproduce import reproduce
from equipoise.cli.sweep import sweep
from equipoise.cli.watch import watch
from equipoise.errors import EquipoiseError, Interrupted, RunFailed

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Personalised federated learning: every client ends with a model of its own, and all learn from each other."
    "\n\n"
    "Begin with `equipoise demo`; then write a TOML file (see `equipoise run --help`) and run it.",
)
app.command()(show)
app.command()(sweep)
app.command()(cka)
app.command()(reproduce)
app.command()(report)
app.command()(watch)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")


class Format(StrEnum):
    table = "table"
    md = "md"
    csv = "csv"
    json = "json"


class Kind(StrEnum):
    algorithms = "algorithms"
    models = "models"
    data = "data"
    partitions = "partitions"
    attacks = "attacks"
    reducers = "reducers"


class Plot(StrEnum):
    scores = "scores"
    losses = "losses"
    attacks = "attacks"
    fairness = "fairness"
    learned = "learned"


@app.command()
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The experiment.")],
    sets: Sets = None,
    out: Out = None,
    data: Data = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar and no table.")] = False,
) -> None:
    """Run an experiment.

    \b
    A small one, with nothing to download:
        rounds = 20
        [data]
        name = "digits-by-writer"
        [model]
        name = "mlp"
        [algorithm]
        name = "ditto"

    Everything else has a default; `equipoise list algorithms` shows what there is. The run folder gets run.toml (every
    setting), metrics.jsonl (a line a round), timings.jsonl, clients.csv, summary.json and checkpoint/.
    """
    from equipoise.config.experiment import Experiment
    from equipoise.reporting import comparison_table
    from equipoise.runs import launch
    from equipoise.storage import run_index

    experiment = Experiment.load(file, sets or [])
    folder = out or launch.default_folder(file, experiment)
    progress = None if quiet else progress_bar()
    bar = Bar(progress, experiment.algorithm_name)
    source = launch.folder_of_data(file, data, bar.tell)
    try:
        if progress is None:
            launch.run(experiment, folder, source, resume, bar)
        else:
            with progress:
                launch.run(experiment, folder, source, resume, bar)
    except Interrupted:
        again = ["equipoise", "run", str(file), *(x for s in sets or [] for x in ("--set", s)), "--out", str(folder)]
        again += ["--data", str(data)] if data else []
        interrupted(f"stopped after round {bar.done}, all of it saved", shlex.join([*again, "--resume"]))
    if not quiet:
        out_console.print(comparison_table.as_table(comparison_table.compare(run_index.find_runs([folder]))))
        out_console.print(f"Run folder: {escape(str(folder))}", highlight=False)


@app.command()
def demo(out: Out = None) -> None:
    """Compare five methods on handwritten digits of 80 writers, in under a minute, without any download."""
    from equipoise.cli.demo import DEFAULT_FOLDER
    from equipoise.cli.demo import demo as run_demo
    from equipoise.reporting import comparison_table

    folder = out or DEFAULT_FOLDER
    progress = progress_bar()
    try:
        with progress:
            found, picture = run_demo(folder, lambda name: Bar(progress, name))
    except Interrupted:
        again = ["equipoise", "demo", *(["--out", str(out)] if out else [])]
        interrupted("stopped, all rounds so far are saved", shlex.join(again))
    out_console.print(comparison_table.as_table(comparison_table.compare(found)))
    say = lambda text: out_console.print(text, highlight=False, soft_wrap=True)  # noqa: E731
    say(
        "personal: every client's own model; global: one for all; hybrid: the better of the two, by validation samples."
    )
    say(f"Picture:     {escape(str(picture))}")
    say(f"Run folders: {escape(str(folder))}/local, fedavg, …")
    say("Try next:")
    say(f"  equipoise report {escape(shlex.quote(str(folder)))} --out report.html")
    say(f"  equipoise compare {escape(shlex.quote(str(folder)))} --format md")
    config = escape(shlex.quote(str(folder / "ditto" / "run.toml")))
    say(f"  equipoise run {config} --set algorithm.lam=1.0 --out runs/ditto-lam1")
    say(f"  equipoise export {escape(shlex.quote(str(folder / 'ditto')))} --client 0 --out client-0.safetensors")
    say("  equipoise list algorithms")


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Run folders, or folders of run folders.")],
    format: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.table,
    fairness: Annotated[bool, typer.Option("--fairness", help="How evenly each method serves the clients.")] = False,
) -> None:
    """A table over runs; mean ± standard deviation where runs differ only in the seed."""
    from equipoise.reporting import comparison_table

    rows = comparison_table.compare(finished(folders)[0])
    if format is Format.table:
        out_console.print(comparison_table.as_table(rows, fairness))
    else:
        print(comparison_table.as_text(rows, format.value, fairness))


@app.command()
def plot(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Run folders, or folders of run folders.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.png", help="The picture.")],
    kind: Annotated[Plot, typer.Option("--kind", help="What to draw.")] = Plot.scores,
) -> None:
    """A picture of runs; a line or a point is the mean of runs that differ only in the seed.

    \b
    scores    test scores against rounds
    losses    test losses against rounds
    attacks   scores of benign clients against the part of malicious ones, a panel an attack
    fairness  variance of test losses over clients against the mean score
    learned   how strongly each client's parameters are tied to the others', before and after (learn2pfed)
    """
    from equipoise.reporting import plots

    if out.suffix.lower() != ".png":
        raise EquipoiseError(f"--out {out} is not allowed; the picture is a PNG file, so name it FILE.png")
    plots.draw(kind.value, finished(folders)[0], out)
    out_console.print(f"Picture: {escape(str(out))}", highlight=False)


@app.command("list")
def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this one, with all its settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What there is to choose from, with parameters, defaults and papers."""
    from equipoise.cli.listing import listing

    entries = listing(kind.value, name)
    if as_json:
        print(json.dumps(entries, indent=2))
        return
    for entry in entries:
        paper = f" [dim]({escape(entry['paper'])})[/dim]" if entry["paper"] else ""
        out_console.print(f"[bold]{escape(entry['name'])}[/bold]  {escape(entry['summary'])}{paper}", highlight=False)
        shown = [row for row in entry["parameters"] if name or row["name"] not in entry["of_layer"]]
        if shown:
            table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
            for row in shown:
                default = "" if row["default"] is None else f"= {json.dumps(row['default'])}"
                table.add_row(
                    escape(row["name"]), escape(default), escape(row["meaning"]), f"[dim]{escape(row['allowed'])}[/dim]"
                )
            out_console.print(table)
        if entry["of_layer"] and not name:
            text = f"and of its layer: {', '.join(entry['of_layer'])} (equipoise list models {entry['name']})"
            out_console.print(Padding(f"[dim]{escape(text)}[/dim]", (0, 0, 0, 2)), highlight=False)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write, .safetensors.")],
    client: Annotated[str | None, typer.Option("--client", metavar="K", help="A client's number or name.")] = None,
    global_: Annotated[bool, typer.Option("--global", help="The global model.")] = False,
    data: Data = None,
) -> None:
    """Write a personal model or the global one as safetensors; equipoise.load_model(FILE) loads it again."""
    from equipoise.runs.export import export_model
    from equipoise.runs.launch import reopen

    if (client is None) == (not global_):
        raise EquipoiseError("say which model to export: either --client K or --global")
    result, experiment = reopen(folder, data)
    name = export_model(result, experiment, client, out)
    out_console.print(
        escape(f"The model of {name} is in {out}; load it with equipoise.load_model({str(out)!r})"), highlight=False
    )


def main() -> None:
    """What the user can put right is said in one sentence; everything else keeps its traceback."""
    try:
        app()
    except RunFailed as error:
        _fail(error, 1)
    except EquipoiseError as error:
        _fail(error, 2)
    except OSError as error:  # a disk or a right that is missing, wherever it shows
        _fail(error, 2)
    except MemoryError as error:
        _fail(f"there is not enough memory for this: {error or 'ask for less'}", 2)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _fail(error: Exception | str, code: int) -> NoReturn:
    print(f"equipoise: {error}", file=sys.stderr)
    raise SystemExit(code)
