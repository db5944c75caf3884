"""The command `equipoise record`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from equipoise.cli.console import err_console, out_console
from equipoise.errors import EquipoiseError


def record(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders of run folders.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE.jsonl", help="File of records to add the runs to.")],
    scale: Annotated[str, typer.Option("--scale", metavar="NAME", help="Scale of the runs, to note beside them.")] = "",
) -> None:
    """Keep the results of finished runs in a small file: one line per run.

    \b
        equipoise record runs/fedeq/body --to experiments/fedeq/results/body.jsonl

    A line has the settings, scores, curves and costs of a run. Tables and plots can be made from such a file without
    the run folders (`equipoise reproduce NAME --published`), and a sweep does not repeat the runs in it
    (`equipoise sweep FILE.toml --record FILE.jsonl`). A run that is in the file already is replaced.
    """
    from equipoise.runs.recording import record_run
    from equipoise.storage.result_records import add_records, prepare_records_file
    from equipoise.storage.run_folder import RunFolder
    from equipoise.storage.run_index import SkippedRuns, search_folders

    prepare_records_file(to)
    finished, unfinished, failed = search_folders(folders)
    skipped = [path for path in failed if not RunFolder(path).config.exists()]  # nothing is known of their settings
    for sentence in SkippedRuns(tuple(unfinished), tuple(skipped)).sentences():
        err_console.print(f"equipoise: {escape(sentence)}", highlight=False, soft_wrap=True)
    records = [record_run(path, scale) for path in (*finished, *failed) if path not in skipped]
    if not records:
        raise EquipoiseError(f"there is no finished run in {', '.join(map(str, folders))}")
    added = add_records(to, records)
    text = f"{to}: {added.new} runs added, {added.replaced} replaced, {added.unchanged} unchanged"
    out_console.print(escape(text), highlight=False, soft_wrap=True)
