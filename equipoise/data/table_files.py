"""Tables in CSV and Parquet files: columns of numbers, and of text for labels."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import IO, Any

import numpy as np

from equipoise.errors import EquipoiseError, first_line
from equipoise.settings import nearest

TABLES = (".csv", ".parquet")
Columns = dict[str, np.ndarray]
"""Columns of a table by name: numbers, or text."""


def column_names(path: Path, delimiter: str = ",") -> list[str]:
    """Return the names of the columns of a CSV or Parquet file."""
    names = _parquet_names(path) if path.suffix == ".parquet" else _header(path, delimiter)
    for name in names:
        if names.count(name) > 1:
            raise EquipoiseError(f"{path}: two columns are named {name!r}; every column needs a different name")
    return list(names)


def read_columns(path: Path, names: Sequence[str], text: Sequence[str] = (), delimiter: str = ",") -> Columns:
    """Return columns of a CSV or Parquet file, as numbers.

    Args:
        path: the file.
        names: the columns to read; other columns are ignored.
        text: those of them that may be text; they are returned as text if a value is not a number.
        delimiter: the character between two values of a CSV file.
    """
    there = column_names(path, delimiter)
    for name in names:
        if name not in there:
            raise EquipoiseError(f"{path} has no column {name!r}{nearest(name, there)}")
    if path.suffix == ".parquet":
        return _read_parquet(path, names, text)
    return _read_csv(path, names, text, delimiter)


@contextmanager
def opened_csv(path: Path) -> Iterator[IO[str]]:
    """Open a CSV file, and turn what goes wrong while it is read into a sentence."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield file
    except FileNotFoundError:
        raise EquipoiseError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EquipoiseError(f"{path} cannot be read as CSV in UTF-8: {error}") from None


def _header(path: Path, delimiter: str) -> list[str]:
    with opened_csv(path) as file:
        names = [name.strip() for name in next(csv.reader(file, delimiter=delimiter), [])]
    if not any(names):
        raise EquipoiseError(f"{path} has no header; its first line must name the columns")
    return names


def _read_csv(path: Path, names: Sequence[str], text: Sequence[str], delimiter: str) -> Columns:
    header = _header(path, delimiter)
    with opened_csv(path) as file:
        content = file.read()
    places = [header.index(name) for name in names]
    quick = None if '"' in content else _quick(content.split("\n")[1:], len(header), places, delimiter)
    if quick is not None and np.isfinite(quick).all():
        return dict(zip(names, quick.T, strict=True))
    return _careful(content, path, header, names, text, delimiter)


def _quick(lines: list[str], width: int, places: Sequence[int], delimiter: str) -> np.ndarray | None:
    """Return the numbers of a table without quotes and text, or None if it is not one."""
    lines = [line for line in lines if line.strip()]
    if not lines or any(line.count(delimiter) != width - 1 for line in lines):
        return None
    try:
        return np.loadtxt(lines, delimiter=delimiter, usecols=places, ndmin=2, comments=None)
    except ValueError:
        return None


def _careful(
    content: str, path: Path, header: list[str], names: Sequence[str], text: Sequence[str], delimiter: str
) -> Columns:
    """Return columns value by value; an error names the line and the column."""
    reader = csv.reader(io.StringIO(content), delimiter=delimiter)
    next(reader)
    values: dict[str, list[Any]] = {name: [] for name in names}
    is_text: set[str] = set()
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            where = f"{path}, line {reader.line_num}"
            if len(row) != len(header):
                raise EquipoiseError(f"{where} has {len(row)} values, but the header names {len(header)} columns")
            for name in names:
                cell = row[header.index(name)].strip()
                if not cell:
                    raise EquipoiseError(f"{where}: the column {name!r} is empty; fill it in, or remove the line")
                values[name].append(cell)
                if (number := _number(cell)) is None:
                    if name not in text:
                        raise EquipoiseError(
                            f"{where}: the column {name!r} has the text {cell[:40]!r}, where a number is needed; "
                            "encode it, or name the inputs with data.features"
                        )
                    is_text.add(name)
                elif not isfinite(number):
                    raise EquipoiseError(f"{where}: the column {name!r} is {cell}; fill it in, or remove the line")
    except csv.Error as error:
        raise EquipoiseError(f"{path}, line {reader.line_num} cannot be read as CSV: {error}") from None
    return {name: np.array(cells, dtype=str if name in is_text else np.float64) for name, cells in values.items()}


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _not_finite(path: Path, name: str, row: int) -> str:
    return (
        f"{path}: the column {name!r} has NaN or infinity, first in sample {row + 1}; fill it in, or remove the sample"
    )


def _parquet(path: Path) -> Any:
    if find_spec("pyarrow") is None:
        raise EquipoiseError(f"{path} needs pyarrow to be read; install it with: pip install 'equipoise[parquet]'")
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path)


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """Open a Parquet file, and turn whatever pyarrow raises for a damaged one into a sentence."""
    try:
        yield _parquet(path)
    except EquipoiseError:
        raise
    except FileNotFoundError:
        raise EquipoiseError(f"there is no file {path}") from None
    except Exception as error:
        raise EquipoiseError(f"{path} cannot be read as Parquet: {first_line(error)}") from None


def _parquet_names(path: Path) -> list[str]:
    with parquet_file(path) as file:
        return list(file.schema_arrow.names)


def _read_parquet(path: Path, names: Sequence[str], text: Sequence[str]) -> Columns:
    with parquet_file(path) as file:
        return _parquet_columns(file, path, names, text)


def _parquet_columns(file: Any, path: Path, names: Sequence[str], text: Sequence[str]) -> Columns:
    """Return columns as numbers or text; a missing value or text where a number is needed is an error."""
    from pyarrow import types

    table = file.read(columns=list(names))
    found: Columns = {}
    for name in names:
        column = table.column(name)
        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise EquipoiseError(f"{path}: the column {name!r} is empty in sample {row + 1}; fill it in, or remove it")
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            found[name] = np.array(column.to_pylist() if kind != column.type else column, dtype=np.float64)
            if not np.isfinite(found[name]).all():
                raise EquipoiseError(_not_finite(path, name, int(np.flatnonzero(~np.isfinite(found[name]))[0])))
        elif name in text and (types.is_string(kind) or types.is_large_string(kind)):
            found[name] = np.array(column.to_pylist(), dtype=str)
        else:
            raise EquipoiseError(
                f"{path}: the column {name!r} has the type {kind}, where a number is needed; encode it, or name the "
                "inputs with data.features"
            )
    return found
