"""`equipoise reproduce NAME --published`: the recorded results of a table or figure."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.cli.reproduce_output import as_plain, print_differences, print_tables, say
from equipoise.errors import EquipoiseError

if TYPE_CHECKING:
    from equipoise.reproduction.comparison import PaperComparison
    from equipoise.reproduction.exhibits import Exhibit
    from equipoise.reproduction.pieces import Piece


def show_published(
    exhibit: "Exhibit", scale: str | None, only: list[str], seeds: int | None, out: Path, as_json: bool
) -> None:
    """Print the recorded results beside the paper's, and draw them; nothing is run, and no data are needed.

    Args:
        exhibit: the table or figure.
        scale: the scale to show, or None for all that have records.
        only: names of the parts; all if empty.
        seeds: number of seeds, in place of those of the files.
        out: the folder of all runs, for pictures.
        as_json: whether to print JSON.
    """
    from equipoise.reproduction.comparison import compare_with_paper
    from equipoise.reproduction.exhibits import SCALES
    from equipoise.reproduction.published import can_draw, published_pieces, published_runs
    from equipoise.reproduction.runner import draw
    from equipoise.reproduction.scale_differences import cut_runs

    shown: dict[str, Any] = {}
    for name in SCALES if scale is None else [scale]:
        pieces = published_pieces(exhibit, name, only, seeds)
        runs = published_runs(pieces)
        if not runs:
            continue
        tables = compare_with_paper(exhibit, runs, name, cut_runs(exhibit, pieces))
        pictures = draw(exhibit, runs, f"{name}-published", out, None) if exhibit.plot and can_draw(exhibit) else []
        shown[name] = as_plain(tables, runs, pictures)
        if as_json:
            continue
        print_tables(exhibit, tables, [run for part in runs.values() for run in part])
        print_differences(exhibit, pieces, name)
        say(_about_records(pieces, sum(map(len, runs.values())), tables), False)
        for picture in pictures:
            say(f"Picture: {picture}", False)
        if exhibit.plot and not can_draw(exhibit):
            say(f"Its picture needs the runs themselves: equipoise reproduce {exhibit.id}", False)
    if not shown:
        at = f" at the scale {scale}" if scale else ""
        of = f" of {', '.join(only)}" if only else ""
        raise EquipoiseError(
            f"no results{of} are recorded for {exhibit.id}{at}; run it with `equipoise reproduce {exhibit.id}`"
        )
    if as_json:
        print(json.dumps(shown, indent=2))


def _about_records(pieces: "list[Piece]", found: int, tables: "list[PaperComparison]") -> str:
    """Return where the figures come from, and over how many seeds they are means."""
    counts = sorted({entry.seeds for table in tables for row in table.entries for entry in row if entry.seeds})
    seeds = f", {_span(counts)} per figure" if counts else ""
    versions = sorted({version for piece in pieces for version in piece.results.versions(piece.every)})
    return f"Recorded results of {found} runs{seeds}, made by version {', '.join(versions)}; nothing was run."


def _span(counts: list[int]) -> str:
    if counts == [1]:
        return "one seed"
    return f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
