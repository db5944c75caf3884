"""The command `equipoise demo`."""

import shlex

from rich.markup import escape

from equipoise.cli.console import Out, interrupted, out_console, progress_bar, show_run
from equipoise.errors import Interrupted


def demo(out: Out = None) -> None:
    """Compare five methods on handwritten digits, without a download.

    \b
        equipoise demo
        equipoise demo --out runs/first

    The 80 writers of the digits are the clients. It takes less than a minute, prints a table and draws a picture.
    """
    from equipoise.reporting import comparison, comparison_table, plots
    from equipoise.runs.demo import DEFAULT_FOLDER
    from equipoise.runs.demo import demo as run_demo

    folder = out or DEFAULT_FOLDER
    progress = progress_bar()
    try:
        with progress:
            found = run_demo(folder, lambda name: show_run(progress, name))
    except Interrupted:
        again = ["equipoise", "demo", *(["--out", str(out)] if out else [])]
        interrupted("stopped, all rounds so far are saved", shlex.join(again))
    picture = folder / "accuracy.png"
    plots.draw("scores", found, picture)
    out_console.print(comparison_table.as_table(comparison.compare(found)))
    show = lambda text: out_console.print(text, highlight=False, soft_wrap=True)  # noqa: E731
    show("personal: each client's own model; global: one model for all; hybrid: the better one by validation samples.")
    show(f"Picture:     {escape(str(picture))}")
    show(f"Run folders: {escape(str(folder))}/local, fedavg, …")
    show("Try next:")
    show(f"  equipoise report {escape(shlex.quote(str(folder)))} --out report.html")
    show(f"  equipoise compare {escape(shlex.quote(str(folder)))} --format md")
    config = escape(shlex.quote(str(folder / "ditto" / "run.toml")))
    show(f"  equipoise run {config} --set algorithm.lam=1.0 --out runs/ditto-lam1")
    show(f"  equipoise export {escape(shlex.quote(str(folder / 'ditto')))} --client 0 --out client-0.safetensors")
    show("  equipoise list algorithms")
