"""The command `equipoise watch`."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from equipoise.cli.console import err_console, out_console
from equipoise.errors import EquipoiseError


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or a folder of run folders.")],
    once: Annotated[bool, typer.Option("--once", help="Show the run once and exit.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, max=3600, help="Seconds between updates.")] = 1.0,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the run to start.")] = 10.0,
) -> None:
    """Watch a run in the terminal.

    \b
        equipoise run examples/digits.toml --out runs/ditto &
        equipoise watch runs/ditto

    You see curves, the remaining time and the slowest clients. The command only reads the folder: you can stop it with
    Ctrl-C and start it again at any time. In a folder with many runs it shows the newest one. It ends with the run; the
    exit code is 1 if the run stopped before its last round. Clients are timed if each is trained alone: in deployments,
    and in simulations with `engine.mode = "threads"`.
    """
    from equipoise.reporting.live_view import RunView, render

    path = _wait_for_run(folder, 0.0 if once else wait)
    view = RunView.at(path)
    if once:
        out_console.print(render(view, out_console.width, out_console.height))
        return
    with Live(console=out_console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                live.update(render(view, out_console.width, out_console.height), refresh=True)
                if not view.working:
                    break
                time.sleep(every)
                view = RunView.at(path)
        except KeyboardInterrupt:
            err_console.print("equipoise: the run continues; watch it again at any time", highlight=False)
            return
    if view.summary is None:
        err_console.print(
            f"equipoise: no process is working on {path}: it stopped after round {view.done} of {view.rounds}; "
            "to resume it, repeat the command that started it with --resume",
            highlight=False,
        )
        raise SystemExit(1)


def _wait_for_run(folder: Path, wait: float) -> Path:
    """Return the newest run in a folder, waiting for one to start."""
    from equipoise.storage.run_index import newest

    until = time.monotonic() + wait
    with err_console.status(f"waiting for a run in {folder}"):
        while (found := newest(folder)) is None:
            if time.monotonic() >= until:
                raise EquipoiseError(f"there is no run in {folder}: neither it nor a folder in it has a run.toml")
            time.sleep(0.1)
    return found
