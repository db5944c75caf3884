"""The command that follows a run."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from equipoise.cli.console import err_console, out_console
from equipoise.errors import EquipoiseError


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or one with a run in it.")],
    once: Annotated[bool, typer.Option("--once", help="Only one look.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, max=3600, help="Seconds between looks.")] = 1.0,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the run to begin.")] = 10.0,
) -> None:
    """Follow a run in the terminal: curves, when it will end, the slowest clients.

    \b
        equipoise run examples/digits.toml --out runs/ditto &
        equipoise watch runs/ditto

    It only reads the folder, so it may be started, stopped with Ctrl-C and started again at any time, and by several
    people. Of a folder with many runs it takes the one that was written last. It ends when the run does; its exit code
    is 1 if that stopped before its last round. Clients are timed where each is worked on alone: in deployments, and in
    simulations with `engine.mode = "threads"`.
    """
    from equipoise.reporting.live_view import RunView, render

    path = _begun(folder, 0.0 if once else wait)
    look = RunView.at(path)
    if once:
        out_console.print(render(look, out_console.width, out_console.height))
        return
    with Live(console=out_console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                live.update(render(look, out_console.width, out_console.height), refresh=True)
                if not look.working:
                    break
                time.sleep(every)
                look = RunView.at(path)
        except KeyboardInterrupt:
            err_console.print("equipoise: the run goes on; watch it again at any time", highlight=False)
            return
    if look.summary is None:
        err_console.print(
            f"equipoise: nobody works in {path}: it stopped after round {look.done} of {look.rounds}; "
            "the command that began it goes on with --resume",
            highlight=False,
        )
        raise SystemExit(1)


def _begun(folder: Path, wait: float) -> Path:
    """The run that is meant, once it is there."""
    from equipoise.storage.run_index import newest

    until = time.monotonic() + wait
    with err_console.status(f"waiting for a run in {folder}"):
        while (found := newest(folder)) is None:
            if time.monotonic() >= until:
                raise EquipoiseError(f"there is no run in {folder}: neither it nor a folder in it has a run.toml")
            time.sleep(0.1)
    return found
