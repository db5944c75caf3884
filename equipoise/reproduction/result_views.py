"""Views of recorded results: tables and curves for documents, each described by a few lines of TOML.

A file `views.toml` beside the records of a paper has one section per view:

    [body]
    files = ["body"]                                  # body.jsonl
    where = { rounds = 100 }                          # settings that all its runs have
    rows = ["algorithm.name", "model.name"]           # one row per combination of values
    columns = ["data.partition.per_client"]           # one group of columns per value; may be left out
    figures = ["personal", { figure = "unconverged", label = "unconverged %", factor = 100, digits = 1 }, "seeds"]
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from equipoise.errors import EquipoiseError
from equipoise.settings import Count, Settings, nearest, read
from equipoise.storage.result_records import Record, read_records
from equipoise.storage.run_folder import read_toml

VIEWS = "views.toml"
MISSING = "–"


class Figure(Settings):
    """A column of figures: means over seeds, with standard deviations."""

    figure: str
    "score (personal, consensus.pooled, unseen; score: personal, else global), figure of summary.json, setting, seeds"
    label: str = ""
    "heading"
    factor: float = 1.0
    "factor of the figures; accuracies are shown in % without one"
    digits: int | None = None
    "decimals; left out: 2 for accuracies, otherwise 4 significant digits"
    against: dict[str, Any] = {}
    "settings of a control: shows differences from the runs with these settings and the same seeds"
    where: dict[str, Any] = {}
    "further settings of the runs in this column"
    over: Literal["seeds", "clients", "better"] = "seeds"
    """clients: with against, mean and standard error over clients of their differences, each a mean over seeds; better:
    with against, the number of clients that are served better than by the control"""
    extreme: Literal["smallest", "largest"] | None = None
    "the runs may differ in more than the seed, and of each seed the smallest or largest figure (or difference) counts"
    round: Count | None = None
    "an evaluated round, at which the curves have the figure; left out: the end of the run, by its summary"


class Axis(Settings):
    """A setting whose values make rows or columns."""

    setting: str
    "name of the setting"
    label: str = ""
    "heading"
    values: tuple[Any, ...] = ()
    "values to show, in this order; left out: all"
    names: dict[str, str] = {}
    "words for values"


class NamedLine(Settings):
    """A row or group of columns that is named, and its runs."""

    label: str
    "heading"
    where: dict[str, Any]
    "settings of its runs"


class View(Settings):
    """A table or plot of recorded results."""

    files: tuple[str, ...]
    "names of the files of records, without .jsonl"
    where: dict[str, Any] = {}
    "settings that all runs have; scale and seed are two"
    rows: tuple[Any, ...]
    "settings, of which every combination of values makes a row; or tables { label, where }"
    columns: tuple[Any, ...] = ()
    "the same for groups of columns"
    repeats: tuple[str, ...] = ()
    "settings whose values are repetitions, as seeds are, such as data.cut"
    figures: tuple[Any, ...] = ("personal",)
    "figures in each group of columns; of a plot, the curves"
    title: str = ""
    "title of a plot"
    axis: str = "score"
    "label of the vertical axis of a plot"
    horizontal: Literal["round", "megabytes"] = "round"
    "horizontal axis of a plot: rounds, or the megabytes that all clients together have sent and received by then"
    logarithmic: bool = False
    "whether the vertical axis of a plot is logarithmic"


Line = tuple[tuple[str, ...], dict[str, Any]]
"""Headings of a row or of a group of columns, and the settings of its runs."""


def read_views(folder: Path) -> dict[str, View]:
    """Return the views that are described in a folder of records."""
    file = folder / VIEWS
    found = {}
    for name, table in read_toml(file).items():
        if not isinstance(table, dict):
            raise EquipoiseError(f"{file}: {name} must be a section, [{name}]")
        found[name] = read(View, table, f"{file}: {name}")
    return found


def find_view(folder: Path, name: str) -> View:
    """Return the view of this name in a folder of records."""
    views = read_views(folder)
    if name not in views:
        raise EquipoiseError(f"{folder / VIEWS} has no view {name!r}{nearest(name, views)}")
    return views[name]


def records_of(view: View, folder: Path) -> list[Record]:
    """Return the runs of a view, without trials; a run that two sweeps share, and both files have, counts once."""
    found: dict[str, Record] = {}
    for name in view.files:
        for record in read_records(folder / f"{name}.jsonl"):
            if not record.trial:
                found.setdefault(_plain([record.digest, record.seed, record.settings]), record)
    return select(found.values(), view.where)


def select(records: Iterable[Record], *wheres: Mapping[str, Any]) -> list[Record]:
    """Return the records with these settings, of which later ones override earlier ones.

    None, which TOML does not have, and an empty list also select the records without the setting.
    """
    wanted = {key: _selected(value) for each in wheres for key, value in each.items()}
    return [record for record in records if all(_selected(_facts(record).get(k)) == v for k, v in wanted.items())]


Repetition = tuple[Any, ...]
"""The seed of a run, and its values of the settings that count as repetitions."""


def repetition(record: Record, repeats: Sequence[str]) -> Repetition:
    """Return by what a run differs from the others of its cell."""
    return record.seed, *(_plain(record.settings.get(name)) for name in repeats)


def check_repetitions(records: Sequence[Record], repeats: Sequence[str], where: str) -> None:
    """Raise an error if records of a table's cell differ in more than the seed, so that a mean makes no sense.

    Args:
        records: the runs in one cell.
        repeats: settings in which they may differ, too.
        where: the view, for the error message.
    """
    known: dict[Repetition, Record] = {}
    for record in records:
        other = known.setdefault(repetition(record, repeats), record)
        if other is not record:
            keys = sorted(record.settings.keys() | other.settings.keys())
            apart = [k for k in keys if record.settings.get(k) != other.settings.get(k)]
            raise EquipoiseError(
                f"{where}: runs with different {', '.join(apart[:3])} are in one place; add one of these settings to "
                "rows, columns or where"
            )


def _facts(record: Record) -> dict[str, Any]:
    return {**record.settings, "scale": record.scale, "seed": record.seed}


def _selected(value: Any) -> str:
    """Return what is compared to select runs: a record does not have a list that is empty by default."""
    return _plain([] if value is None else value)


def _plain(value: Any) -> str:
    """Return a value as JSON, to compare it: tuples are lists, 1 is 1.0, and true is not 1."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return json.dumps(value, sort_keys=True, default=str)


def lines_of(written: Sequence[Any], records: Iterable[Record], where: str) -> tuple[list[str], list[Line]]:
    """Return the headings of the axes, and the lines: one per combination of values that occurs."""
    if written and all(isinstance(each, dict) and "where" in each for each in written):
        named = [read(NamedLine, each, where) for each in written]
        return [""], [((line.label,), line.where) for line in named]
    axes = [Axis(setting=each) if isinstance(each, str) else read(Axis, each, where) for each in written]
    found: dict[tuple[str, ...], tuple[list[Any], tuple[str, ...], dict[str, Any]]] = {}
    for record in records:
        values = [_facts(record).get(axis.setting) for axis in axes]
        if all(not axis.values or _plain(v) in map(_plain, axis.values) for axis, v in zip(axes, values, strict=True)):
            heads = tuple(axis.names.get(str(v), text_of(v)) for axis, v in zip(axes, values, strict=True))
            settings = {axis.setting: v for axis, v in zip(axes, values, strict=True)}
            order = [_order(axis, value) for axis, value in zip(axes, values, strict=True)]
            found.setdefault(tuple(map(_plain, values)), (order, heads, settings))
    lines = [(heads, settings) for _, heads, settings in sorted(found.values(), key=lambda line: line[0])]
    _check_headings(lines, where)
    return [axis.label or short_setting(axis.setting) for axis in axes], lines


def _check_headings(lines: Sequence[Line], where: str) -> None:
    """Raise an error if two lines look the same, so that nobody could tell which is which."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}
    for heads, settings in lines:
        other = known.setdefault(heads, settings)
        if other is not settings:
            key = next(k for k in settings if _plain(settings[k]) != _plain(other[k]))
            raise EquipoiseError(
                f"{where}: the values {other[key]!r} and {settings[key]!r} of {key} have the same heading "
                f"{' '.join(heads)!r}; give them different names, or select one with values"
            )


def _order(axis: Axis, value: Any) -> tuple[int, float, str]:
    if axis.values:
        return [*map(_plain, axis.values)].index(_plain(value)), 0.0, ""
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return (1, 0.0, str(value)) if value is not None else (2, 0.0, "")


def short_setting(name: str) -> str:
    """Return a setting's name in headings."""
    return name.removesuffix(".name").removesuffix(".kind").rpartition(".")[2]


def text_of(value: Any) -> str:
    """Return a setting's value as text."""
    if value is None:
        return MISSING
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
