"""The command-line program, which collects the commands of this package."""

import os
import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
import typer.core

from equipoise.cli.adapt import adapt
from equipoise.cli.audit import audit
from equipoise.cli.cka import cka
from equipoise.cli.command_group import CommandGroup, SettingsCommand
from equipoise.cli.compare import compare
from equipoise.cli.data import data_app
from equipoise.cli.demo import demo
from equipoise.cli.deploy import deploy_app
from equipoise.cli.export import export
from equipoise.cli.list import list_
from equipoise.cli.plot import plot
from equipoise.cli.predict import predict
from equipoise.cli.record import record
from equipoise.cli.report import report
from equipoise.cli.reproduce import reproduce
from equipoise.cli.run import run
from equipoise.cli.show import show
from equipoise.cli.sweep import sweep
from equipoise.cli.watch import watch
from equipoise.distributed import environment
from equipoise.errors import EquipoiseError, ProcessLost, RunFailed, sentence_of

typer.core.HAS_RICH = False  # help is plain text; with rich, Typer would print "\\[default: 1]"
app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Personalised federated learning: every client gets its own model, and all learn from each other."
    "\n\n"
    "Start with `equipoise demo`. Then write a TOML file (see `equipoise run --help`) and run it.",
)
for command in (demo, run, show, watch, compare, plot, report, sweep, reproduce, record, cka, export, predict, adapt):
    app.command(cls=SettingsCommand if command in (run, show, sweep, reproduce) else None)(command)
app.command()(audit)
app.command("list")(list_)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"equipoise {version('equipoise')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command-line program.

    Errors that the user can fix are printed as one sentence; all others keep their traceback.
    """
    if environment.LAUNCHED in os.environ:
        environment.exit_with_parent()
    try:
        app()
    except ProcessLost as error:
        if environment.world_size() > 1:
            _leave(error)
        _fail(error, 1)
    except RunFailed as error:
        _fail(error, 1)
    except EquipoiseError as error:
        _fail(error, 2)
    except OSError as error:  # such as a full disk or a missing permission
        _fail(error, 2)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if (sentence := sentence_of(error)) is None:
            raise
        _fail(sentence, 2)


def _leave(error: ProcessLost) -> NoReturn:
    """Exit at once: connections to processes that are gone could abort this one while it is taken down."""
    launched = environment.LAUNCHED in os.environ  # then the process that started this one reports which has ended
    if not launched:
        print(f"equipoise: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(environment.LOST if launched else 1)


def _fail(error: Exception | str, code: int) -> NoReturn:
    print(f"equipoise: {error}", file=sys.stderr)
    raise SystemExit(code)
