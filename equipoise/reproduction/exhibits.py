"""Exhibits: the tables and figures of the papers, the files that reproduce them, and the published figures.

A paper is a folder of experiments: sweeps, paper/tables.toml with the published figures, and exhibits.toml, which says
what belongs to which table. `times.json`, next to the papers, has the measured or estimated time of each file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.settings import nearest
from equipoise.storage.run_folder import read_toml

TIMES, EXHIBITS = "times.json", "exhibits.toml"
SCALES = ("smoke", "small", "paper")
LONG = 24 * 3600
"""Seconds on two cores above which an exhibit needs a larger machine."""
Figure = tuple[float | None, float | None]
"""A published figure, if the paper has one (`[]` in paper/tables.toml), and its standard deviation, if it has that."""


def own() -> Path:
    """Return the folder of the experiments that come with the package; in a checkout it is next to the package."""
    inside = Path(__file__).parents[1] / "experiments"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "experiments"


@dataclass(frozen=True)
class ExhibitPart:
    """A part of an exhibit, such as one data set, which `--only` can select."""

    name: str
    files: tuple[str, ...]
    "sweeps in the paper's folder"
    set: tuple[str, ...] = ()
    "settings that override those of the files"


@dataclass(frozen=True)
class Line:
    """A row or a column of a table: its runs, and the score that is shown."""

    key: str
    "key of the published figures, for rows"
    label: str = ""
    part: str = ""
    score: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(written: str | Mapping[str, Any]) -> "Line":
        """Read a row or column; a plain name is that of an algorithm."""
        if isinstance(written, str):
            return Line(written, written, where={"algorithm.name": written})
        return Line(**{"label": written["key"], **written})


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of a paper."""

    place: Path
    "folder of all papers"
    paper: str
    name: str
    title: str
    why: str = ""
    "reason why there is nothing to run, if so"
    lacks: str = ""
    "parts of the paper that are missing or replaced here"
    note: str = ""
    "other differences from the paper"
    parts: tuple[ExhibitPart, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)
    "settings that select among the runs of the files"
    rows: tuple[Line, ...] = ()
    columns: tuple[Line, ...] = ()
    figures: str = ""
    "section of paper/tables.toml; it has one section per part if columns have no part"
    score: str = ""
    "kind of model, unless rows or columns name it: personal, global, hybrid or unseen; default: personal, else global"
    moment: str = "end"
    "evaluation that counts: end (the last one), or validation (the best one on validation samples)"
    target: Mapping[str, float] = field(default_factory=dict)
    "by scale, the score to which the time of training is measured, in place of scores"
    relative: str = ""
    "row by whose figure all others are divided"
    plot: str = ""
    "kind of picture to draw"
    each: tuple[str, ...] = ()
    "settings for each combination of which there is one picture"
    shown: Mapping[str, str] = field(default_factory=dict)
    "further columns, and the figure of summary.json in each"

    @property
    def id(self) -> str:
        """Return the name on the command line."""
        return f"{self.paper}-{self.name}"

    @property
    def differs(self) -> str:
        """Return the differences from the paper, in words."""
        return self.why or "; ".join(text for text in (self.lacks, self.note) if text)

    @property
    def folder(self) -> Path:
        """Return the folder of the paper."""
        return self.place / self.paper

    def published(self, part: str = "") -> dict[str, list[Figure]]:
        """Return the published figures, one per column, by the keys of the rows."""
        if not self.figures:
            return {}
        found = _tables(self.folder)[self.figures]
        rows = found.get(part, {}) if part and part in found else found
        return {key: _figures(row) for key, row in rows.items() if key != "columns" and not isinstance(row, dict)}

    @property
    def joint(self) -> bool:
        """Tell whether there is one table for all parts."""
        return any(column.part for column in self.columns)

    def chosen(self, only: list[str]) -> list[ExhibitPart]:
        """Return the parts with these names, or all if there are no names."""
        known = [part.name for part in self.parts]
        for name in only:
            if name not in known:
                raise EquipoiseError(f"{self.id} has no part {name!r}{nearest(name, known)}")
        return [part for part in self.parts if part.name in only or not only]

    def data(self, parts: list[ExhibitPart] | None = None) -> list[str]:
        """Return the names of the data sets that these parts need, or all parts."""
        names: dict[str, None] = {}
        for part in self.parts if parts is None else parts:
            given = [item.partition("=")[2] for item in part.set if item.startswith("data.name=")]
            named = [_read(self.folder / f"{file}.toml").get("data", {}).get("name") for file in part.files]
            names |= dict.fromkeys(given or [name for name in named if name])
        return list(names)


def _figures(row: Any) -> list[Figure]:
    values = row if isinstance(row, list) else [row]
    return [(None, None) if v == [] else (v[0], v[1]) if isinstance(v, list) else (v, None) for v in values]


@cache
def _read(path: Path) -> dict[str, Any]:
    return read_toml(path)


def _tables(paper: Path) -> dict[str, Any]:
    return _read(paper / "paper" / "tables.toml")


def _exhibit(place: Path, paper: str, sets: Mapping[str, list[str]], written: Mapping[str, Any]) -> Exhibit:
    table = dict(written)
    files = table.pop("files", [])
    parts = []
    for part in table.pop("parts", ()):
        if isinstance(part, str):
            alike = [name for name in files if "{part}" not in name]  # one file for many data sets, which `sets` choose
            names = tuple(name.format(part=part) for name in files)
            parts.append(ExhibitPart(part, names, tuple(sets.get(part, ())) if alike else ()))
        else:
            parts.append(ExhibitPart(part["name"], tuple(part["files"]), tuple(part.get("set", ()))))
    rows, columns = (tuple(map(Line.read, table.pop(key, ()))) for key in ("rows", "columns"))
    each = tuple(table.pop("each", ()))
    return Exhibit(place, paper, parts=tuple(parts), rows=rows, columns=columns, each=each, **table)


def exhibits(place: Path) -> dict[str, Exhibit]:
    """Return all exhibits by name, in the order of the papers."""
    found = {}
    for file in _files(place):
        tables = _read(file)
        try:
            for written in tables["exhibit"]:
                exhibit = _exhibit(place, file.parent.name, tables.get("sets", {}), written)
                _check(exhibit, file)
                found[exhibit.id] = exhibit
        except (AttributeError, KeyError, TypeError) as error:
            raise EquipoiseError(
                f"{file} is not a file of exhibits: {error}; docs/reproduce.md describes its keys"
            ) from None
    return found


def _check(exhibit: Exhibit, file: Path) -> None:
    """Find errors that would otherwise show only after all runs."""

    def wrong(text: str) -> EquipoiseError:
        return EquipoiseError(f"{file}: {exhibit.name}: {text}")

    if not exhibit.why and not exhibit.parts:
        raise wrong("it has neither parts to run nor a reason why there is nothing to run (`why`)")
    if exhibit.figures and exhibit.figures not in _tables(exhibit.folder):
        raise wrong(f"figures = {exhibit.figures!r} is not a section of paper/tables.toml")
    keys = [row.key for row in exhibit.rows]
    if exhibit.relative and exhibit.relative not in keys:
        raise wrong(f"relative = {exhibit.relative!r} is not one of its rows{nearest(exhibit.relative, keys)}")
    if exhibit.target and set(exhibit.target) != set(SCALES):
        raise wrong(f"target needs a score for each of {', '.join(SCALES)}")
    for column in exhibit.columns:
        if column.part:
            exhibit.chosen([column.part])


def _files(place: Path) -> list[Path]:
    if not (found := sorted(place.glob(f"*/{EXHIBITS}"))):
        raise EquipoiseError(f"{place} holds no papers: no folder in it has a file {EXHIBITS}")
    return found


def papers(place: Path) -> dict[str, str]:
    """Return the title of each paper, by the name of its folder."""
    return {file.parent.name: _read(file).get("paper", file.parent.name) for file in _files(place)}


def find(name: str, place: Path) -> Exhibit:
    """Return the exhibit with this name."""
    known = exhibits(place)
    if name not in known:
        raise EquipoiseError(f"there is no exhibit {name!r}{nearest(name, known)}")
    return known[name]


@dataclass(frozen=True)
class Cost:
    """The cost of a file at one scale."""

    runs: int
    seconds: float
    "mean seconds of one run on one core"


@cache
def _times(place: Path) -> dict[str, dict[str, Any]]:
    path = place / TIMES
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def cost(exhibit: Exhibit, file: str, part: ExhibitPart, scale: str) -> Cost | None:
    """Return the cost that benchmarks/experiments.py measured or estimated, or None if it did not."""
    found = _times(exhibit.place).get(timed(exhibit.paper, file, part), {}).get(scale)
    return None if found is None else Cost(**found)


def timed(paper: str, file: str, part: ExhibitPart) -> str:
    """Return the name of a file in times.json, with the settings that override it."""
    return " ".join([f"{paper}/{file}", *part.set])
