"""Marked blocks of documents that are filled from recorded results.

    <!-- table: fedeq/body -->         the view [body] of experiments/fedeq/results/views.toml
    <!-- plot: fedeq/norms -->         its curves, in the file fedeq-norms.svg beside the document
    <!-- exhibit: fedeq-table1 small -->  the recorded results of an exhibit beside the paper's
    <!-- end -->                       ends each block

`python -m equipoise.reproduction.documents` fills them in docs/; with --check it only says which are out of date.
"""

import json
import re
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.reporting.plots import draw_curves
from equipoise.reproduction.comparison import compare_with_paper
from equipoise.reproduction.exhibits import find, own
from equipoise.reproduction.published import RESULTS, published_pieces, published_runs
from equipoise.reproduction.result_tables import markdown_table
from equipoise.reproduction.result_views import find_view
from equipoise.reproduction.scale_differences import cut_runs
from equipoise.reproduction.view_figures import curves_of, table_of
from equipoise.storage import atomic_files

_BEGIN = re.compile(r"^<!-- (table|plot|exhibit): (.*?) -->$")
_END = "<!-- end -->"
_FENCE = "```"


def filled(page: Path, place: Path, draw: bool = True) -> str:
    """Return the text of a document with all its marked blocks filled.

    Args:
        page: the document.
        place: the folder of all papers.
        draw: whether pictures are drawn as well, where they are out of date.
    """
    found: list[str] = []
    block: str | None = None
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
        fenced = fenced != line.startswith(_FENCE)
        begins = None if fenced else _BEGIN.match(line)
        if begins and block is not None:
            raise EquipoiseError(f"{page}, line {number}: the block before it has no {_END}")
        if begins:
            block = line
            try:
                found += [line, _content(begins[1], begins[2], page, place, draw)]
            except EquipoiseError as error:
                raise EquipoiseError(f"{page}, line {number}: {error}") from None
        elif block is not None and line == _END:
            block = None
        if block is None:
            found.append(line)
    if block is not None:
        raise EquipoiseError(f"{page}: the block {block} has no {_END}")
    return "\n".join(found)


def _content(kind: str, name: str, page: Path, place: Path, draw: bool) -> str:
    """Return what belongs into a block."""
    if kind == "exhibit":
        return _exhibit(name, place)
    paper, slash, view_name = name.partition("/")
    if not slash:
        raise EquipoiseError(f"{name!r} is not a view; it must be PAPER/VIEW, such as fedeq/body")
    folder = place / paper / RESULTS
    view = find_view(folder, view_name)
    if kind == "table":
        return table_of(view, folder, view_name)
    curves = curves_of(view, folder, view_name)
    shown: dict[str, Any] = {"title": view.title, "axis": view.axis, "logarithmic": view.logarithmic}
    if view.horizontal != "round":
        shown["horizontal"] = view.horizontal
    picture = page.with_name(f"{paper}-{view_name}.svg")
    # Pictures of other versions of matplotlib have other bytes, so what is drawn is compared, and not the picture.
    digest = blake2b(json.dumps([curves, shown], sort_keys=True).encode(), digest_size=6).hexdigest()
    text = f"![{view.title or view_name}]({picture.name})\n<!-- drawn from {digest} -->"
    if draw and not (picture.exists() and text in page.read_text(encoding="utf-8")):
        draw_curves(curves, picture, **shown)
    if not draw and not picture.exists():
        return f"{picture.name} is missing"
    return text


def _exhibit(words: str, place: Path) -> str:
    """Return the recorded results of an exhibit at a scale, beside the paper's."""
    name, _, scale = words.partition(" ")
    exhibit = find(name, place)
    pieces = published_pieces(exhibit, scale or "small")
    runs = published_runs(pieces)
    tables = compare_with_paper(exhibit, runs, scale or "small", cut_runs(exhibit, pieces))
    if not any(table.rows for table in tables):
        raise EquipoiseError(f"no table of {name} is recorded at the scale {scale or 'small'}")
    found = []
    for table in tables:
        body = [[row, *map(table.text, cells)] for row, cells in zip(table.rows, table.entries, strict=True)]
        found.append(markdown_table([f"{table.title}, {table.unit}", *table.columns], body))
    return "\n\n".join(found)


def fill(pages: Sequence[Path], place: Path, check: bool = False) -> list[Path]:
    """Fill the blocks of documents; return those that were out of date.

    Args:
        pages: the documents.
        place: the folder of all papers.
        check: whether nothing is written.
    """
    changed = []
    for page in pages:
        text = filled(page, place, draw=not check)
        if text != page.read_text(encoding="utf-8"):
            changed.append(page)
            if not check:
                atomic_files.write_text(page, text)
    return changed


def main(arguments: Sequence[str]) -> int:
    """Fill the documents that are named, or all in docs/; return the exit code."""
    check = "--check" in arguments
    named = [Path(word) for word in arguments if word != "--check"]
    place = own()
    pages = named or sorted((place.parent / "docs").rglob("*.md"))
    try:
        changed = fill(pages, place, check)
    except (EquipoiseError, OSError) as error:
        print(f"equipoise: {error}", file=sys.stderr)
        return 2
    for page in changed:
        print(f"{page}: {'out of date; run `make results`' if check else 'filled'}")
    return int(check and bool(changed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
