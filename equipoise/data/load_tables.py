"""Tables of loads: from a file to the series of its clients on a uniform grid, and notes about what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from equipoise.data.clocks import local_minutes, to_text
from equipoise.data.moments import read_moments
from equipoise.data.owner_windows import OwnerSeries
from equipoise.data.series_files import TableLayout, read_series
from equipoise.data.table_files import column_names
from equipoise.data.text_encoding import check_name
from equipoise.data.time_grid import TimeGrid, on_grid
from equipoise.errors import EquipoiseError
from equipoise.settings import nearest

Gaps = Literal["skip", "interpolate", "error"]


@dataclass(frozen=True)
class LoadFormat:
    """How a file has loads, and what is made of them."""

    time: str | None = None
    "column of times; None: the first"
    target: str | None = None
    "column of the load in a file of one client; None: the only one that is left"
    exogenous: tuple[str, ...] = ()
    delimiter: str = ","
    decimal: str = "."
    time_format: str | None = None
    timezone: str | None = None
    resample: int | None = None
    "minutes over which values are averaged"
    gaps: Gaps = "skip"
    longest_gap: int = 1


@dataclass(frozen=True)
class LoadTable:
    """The series of a file."""

    series: dict[str, OwnerSeries]
    step: int
    zone: str
    notes: tuple[str, ...]
    "one for each series with gaps"


def read_loads_of(path: Path, form: LoadFormat, client: str | None) -> LoadTable:
    """Read a file of one client, or a table with one column per client.

    Args:
        path: the file.
        form: how it has loads.
        client: the client's name if it is a file of one client, else None.
    """
    header = column_names(path, form.delimiter)
    time, loads = _columns(path, header, form, wide=client is None)
    layout = TableLayout(time, (*loads, *form.exogenous), form.delimiter, form.decimal)
    table = read_series(path, header, layout)
    loaded = replace(table, values=table.values[:, : len(loads)])
    moments = read_moments(str(path), loaded, form.timezone, form.time_format)
    grid = on_grid(str(path), moments.minutes, table.values[moments.kept], table.rows[moments.kept], moments.written)
    notes = _gap_notes(path, grid, moments.zone, ["" if client is not None else loads[0], *loads[1:], *form.exogenous])
    if notes and form.gaps == "error":
        raise EquipoiseError(f"{notes[0]}; fill them in, or set data.gaps = 'skip' or 'interpolate'")
    filled = grid.filled(form.longest_gap) if form.gaps == "interpolate" else None
    step = form.resample or grid.step
    if step % grid.step:
        raise EquipoiseError(
            f"data.resample = {step} is not possible for {path}, which has a value every {grid.step} minutes; it must "
            f"be a multiple of {grid.step}"
        )
    ahead = int(local_minutes(np.array([grid.start]), moments.zone)[0]) - grid.start
    grid, filled = grid.averaged(step, ahead), filled and filled.averaged(step, ahead)
    names = loads if client is None else [client]
    series = {name: _owner(grid, filled, k, len(loads)) for k, name in enumerate(names)}
    return LoadTable(series, step, moments.zone, notes)


def _columns(path: Path, header: Sequence[str], form: LoadFormat, wide: bool) -> tuple[str, list[str]]:
    """Return the column of times and those of loads."""
    time = header[0] if form.time is None else form.time
    for setting, name in [("time", time), *(("exogenous", name) for name in form.exogenous)]:
        if name not in header:
            raise EquipoiseError(f"{path} has no column {name!r} (data.{setting}){nearest(name, header)}")
    if time in form.exogenous:
        raise EquipoiseError(f"data.exogenous has {time!r}, which is the column of times; leave it out")
    others = [name for name in header if name != time and name not in form.exogenous]
    if not others:
        mark = next((c for c in ";\t|" if len(header) == 1 and c in header[0]), "")
        hint = f"; if values are separated by {mark!r}, set data.delimiter = {mark!r}" if mark else ""
        raise EquipoiseError(f"{path} has no column of loads beside {', '.join(map(repr, header))}{hint}")
    if wide:
        if form.target is not None:
            raise EquipoiseError(
                f"data.target = {form.target!r} is for a folder with one file per client, but {path} is one table with "
                "one column per client; leave it out"
            )
        for name in others:
            check_name(path, name)
        return time, others
    if form.target is None and len(others) > 1:
        raise EquipoiseError(
            f"{path} has {len(others)} columns that may be the load: {', '.join(others[:8])}; name it with data.target"
        )
    target = others[0] if form.target is None else form.target
    if target not in others:
        raise EquipoiseError(f"{path} has no column {target!r} (data.target) for the load{nearest(target, others)}")
    return time, [target]


def _gap_notes(path: Path, grid: TimeGrid, zone: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a note for each series that misses values between its first and its last one."""
    notes = []
    for name, column in zip(names, np.isnan(grid.columns).T, strict=True):
        known = np.flatnonzero(~column)
        if not len(known) or len(known) == known[-1] - known[0] + 1:
            continue
        first = known[0] + int(column[known[0] :].argmax())
        count = known[-1] - known[0] + 1 - len(known)
        time = to_text(local_minutes(np.array([grid.start + first * grid.step]), zone)[0])
        what, are = ("values", "are") if count > 1 else ("value", "is")
        what += f" of {name!r}" if name else ""
        notes.append(
            f"{path.name}: {count} {what} {are} missing, the first after row {grid.rows[:first].max()}, {time}"
        )
    return tuple(notes)


def _owner(grid: TimeGrid, filled: TimeGrid | None, k: int, loads: int) -> OwnerSeries:
    """Return the series in a column of a grid, from its first value to its last one."""
    known = np.flatnonzero(~np.isnan(grid.columns[:, k]))
    begin, end = (known[0], known[-1] + 1) if len(known) else (0, 0)
    return OwnerSeries(
        measured=grid.columns[begin:end, k],
        start=grid.start + int(begin) * grid.step,
        before=int(begin),
        moments=len(grid),
        filled=None if filled is None else filled.columns[begin:end, k],
        exogenous=grid.columns[begin:end, loads:],
        exogenous_filled=None if filled is None else filled.columns[begin:end, loads:],
    )
