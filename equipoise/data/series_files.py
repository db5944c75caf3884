"""Tables of time series in CSV and Parquet files: a column of times, and columns of numbers with gaps."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.data.table_files import opened_csv, parquet_file
from equipoise.errors import EquipoiseError

_MISSING = ("", "nan", "na", "n/a", "null", "none", "-")
_BLOCK = 4096  # rows whose numbers are packed at once


@dataclass(frozen=True)
class SeriesTable:
    """The rows of a table."""

    times: Sequence[str | datetime]
    values: np.ndarray
    "numbers, (row, column); NaN where a cell is empty"
    rows: np.ndarray
    "number of each row in the file, for messages"


@dataclass(frozen=True)
class TableLayout:
    """Which columns are read, and how a CSV file writes them."""

    time: str
    columns: tuple[str, ...]
    delimiter: str = ","
    decimal: str = "."


def read_series(path: Path, header: Sequence[str], layout: TableLayout) -> SeriesTable:
    """Read a table of time series.

    Args:
        path: the file, CSV or Parquet.
        header: the names of all its columns.
        layout: which of them are read.
    """
    table = _read_parquet(path, layout) if path.suffix == ".parquet" else _read_csv(path, header, layout)
    for k, column in np.argwhere(np.isinf(table.values))[:1]:
        raise _not_a_number(path, table.rows[k], layout.columns[column], "infinity")
    return table


def _read_csv(path: Path, header: Sequence[str], layout: TableLayout) -> SeriesTable:
    place, places = header.index(layout.time), [header.index(name) for name in layout.columns]
    times: list[str] = []
    rows: list[int] = []
    blocks: list[np.ndarray] = []
    block: list[list[float]] = []
    with opened_csv(path) as file:
        reader = csv.reader(file, delimiter=layout.delimiter)
        next(reader)
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                raise EquipoiseError(
                    f"{path}, row {reader.line_num} has {len(cells)} values, but the header names {len(header)} columns"
                )
            times.append(cells[place].strip())
            rows.append(reader.line_num)
            found = [_number(cells[k].strip(), layout.decimal) for k in places]
            if None in found:
                column = found.index(None)
                raise _not_a_number(path, reader.line_num, layout.columns[column], repr(cells[places[column]][:40]))
            block.append(found)  # type: ignore[arg-type]
            if len(block) == _BLOCK:
                blocks.append(np.array(block))
                block = []
    blocks.append(np.array(block).reshape(len(block), len(places)))
    return SeriesTable(times, np.concatenate(blocks), np.array(rows))


def _number(cell: str, decimal: str) -> float | None:
    """Return the number in a cell, NaN if it is empty, or None if it is something else."""
    if decimal != ".":
        cell = cell.replace(".", "?").replace(decimal, ".")  # 1.234 could be a thousand: not a number
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return float("nan") if cell.lower() in _MISSING else None


def _not_a_number(path: Path, row: int, column: str, cell: str) -> EquipoiseError:
    return EquipoiseError(
        f"{path}, row {row}, column {column!r}: {cell} is not a number; correct it, or leave the cell empty if the "
        "value is missing"
    )


def _read_parquet(path: Path, layout: TableLayout) -> SeriesTable:
    from pyarrow import compute, timestamp, types

    with parquet_file(path) as file:
        table = file.read(columns=[layout.time, *layout.columns])
        column = table.column(layout.time)
        if types.is_timestamp(column.type):  # without nanoseconds, for which Python has no type
            column = compute.cast(column, timestamp("us", column.type.tz), safe=False)
        times = [_moment(path, k, cell) for k, cell in enumerate(column.to_pylist())]
        values = np.empty((len(times), len(layout.columns)))
        for k, name in enumerate(layout.columns):
            kind = table.column(name).type
            if not (types.is_integer(kind) or types.is_floating(kind)):
                raise EquipoiseError(f"{path}: the column {name!r} has the type {kind}, where numbers are needed")
            values[:, k] = table.column(name).cast("float64").to_numpy()
    return SeriesTable(times, values, np.arange(1, len(times) + 1))


def _moment(path: Path, k: int, cell: Any) -> str | datetime:
    if isinstance(cell, (str, datetime)):
        return cell
    if isinstance(cell, date):
        return datetime.combine(cell, time())
    raise EquipoiseError(f"{path}, row {k + 1}: {str(cell)[:40]!r} in the column of times is not a date and time")
