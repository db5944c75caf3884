"""Tables of results for documents: the runs of an experiment's file, means over seeds, Markdown."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from equipoise.runs.sweep import expand_sweep
from equipoise.storage.run_folder import read_toml
from equipoise.storage.run_index import FinishedRun, find_runs


def runs_of(file: Path, folder: Path, scale: str | None = None) -> list[FinishedRun]:
    """Return the finished runs in a folder that belong to a file, at a scale if the file has scales."""
    tables = read_toml(file)
    scale = scale if scale in tables.get("scale", {}) else None
    wanted, _ = expand_sweep(tables, scale, folders=[file.parent])
    done = [cell.folder(folder) for cell in wanted if cell.done(folder)]
    return find_runs(done) if done else []


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean as text, with the standard deviation if there are several values."""
    if not values:
        return "–"
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def markdown(title: str, head: Sequence[object], body: Iterable[Sequence[object]]) -> str:
    """Return a section with a table, or an empty string if the table has no rows."""
    rows = list(body)
    if not rows:
        return ""
    return f"\n## {title}\n\n{markdown_table(head, rows)}"


def markdown_table(head: Sequence[object], body: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    rows = (head, ["---"] * len(head), *body)
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)
