"""Readers of load tables, one row per moment and one column per client: the benchmarks' CSV, and UCI's text file."""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from equipoise.data import text_encoding
from equipoise.data.archives import archive_errors, open_zip, opened
from equipoise.data.cache import Arrays
from equipoise.data.clocks import read_minutes
from equipoise.data.source import DataProgress
from equipoise.errors import EquipoiseError

UCI = "LD2011_2014.txt"
_BLOCK_LINES = 2000  # lines parsed at once
_LONGEST = 1 << 16  # characters in a line; UCI's have some ten thousand
_MOST = 2_000_000  # rows; UCI's file has 140,256
_MOST_BLANK = 1024  # blocks of blank space after the last row
_ROWS = 140_257  # lines of UCI's file, for the progress bar


def read_loads(path: Path, progress: DataProgress) -> Arrays:
    """Read a table: the series, the clients' names, the minutes between two moments, and when the first one is."""
    with _lines(path) as lines:
        names = _header(path, lines)
        blocks: list[np.ndarray] = []
        clock = _Clock(path)
        row = 2
        while block := list(islice(lines, _BLOCK_LINES)):
            for k, line in enumerate(block):
                clock.tick(line, row + k)
            blocks.append(_numbers(path, names, block, row))
            row += len(block)
            progress(row, max(row, _ROWS))
    series = np.concatenate(blocks) if blocks else np.empty((0, len(names)), np.float32)
    return {
        "series": series,
        "names": text_encoding.names_to_bytes(names),
        "minutes": np.array(clock.checked_step()),
        "start": np.array(clock.first),
    }


def count_loads(path: Path) -> tuple[int, int, int]:
    """Return the number of clients, of moments, and the minutes between two, without parsing the values."""
    with _lines(path) as lines:
        names, clock, rows = _header(path, lines), _Clock(path), 0
        for line in lines:
            rows += 1
            if rows <= 2:
                clock.tick(line, 1 + rows)
    return len(names), rows, clock.checked_step()


class _Clock:
    """Checks that the moments are evenly spaced, which windows and the split in time rely on."""

    def __init__(self, path: Path):
        self.path, self.step, self.first = path, 0, 0
        self.last: int | None = None

    def tick(self, line: str, row: int) -> None:
        cell = line.split(_separator(line), 1)[0].strip('"')
        minute, offset = read_minutes(cell, f"{self.path}, row {row}")
        if offset is not None:
            raise EquipoiseError(
                f"{self.path}, row {row}: {cell[:40]!r} is not a date and time in whole minutes without an offset"
            )
        if self.last is None:
            self.first = minute
        else:
            self.step = self.step or minute - self.last
            if minute - self.last != self.step:
                raise EquipoiseError(
                    f"{self.path}, row {row}: {cell!r} is {minute - self.last} minutes after the row before, not "
                    f"{self.step} as between the first two; sort the rows and fill the gaps"
                )
        self.last = minute

    def checked_step(self) -> int:
        if self.step not in (15, 60):
            raise EquipoiseError(
                f"{self.path} has a value every {self.step} minutes; there must be one every 15 or every 60"
            )
        return self.step


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[str]]:
    """Open the table, packed or not, as an iterator over its lines."""
    with archive_errors(path):
        zipped = zipfile.is_zipfile(path)  # by its content, as an unfinished download has another name
    if not zipped:
        with opened(path) as file:
            yield _decoded(path, file)
        return
    with archive_errors(path), open_zip(path) as archive:
        inside = [n for n in archive.namelist() if Path(n).name == UCI and not n.startswith("__MACOSX")]
        if not inside:
            raise EquipoiseError(f"{path} does not contain {UCI}; it is not UCI's archive")
        with archive.open(inside[0]) as member:
            yield _decoded(path, cast(BinaryIO, member))


def _decoded(path: Path, file: BinaryIO) -> Iterator[str]:
    row = 0
    while line := file.readline(_LONGEST + 1):
        row += 1
        if len(line) > _LONGEST or row > _MOST:
            raise EquipoiseError(f"{path}, row {row}: a load table cannot be that long")
        try:
            decoded = line.decode("utf-8-sig" if row == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise EquipoiseError(f"{path}, row {row}: this is not text in UTF-8") from None
        if not decoded:
            # To the end, where packed files have their checksums.
            for _ in range(_MOST_BLANK):
                if not (rest := file.read(_LONGEST)):
                    return
                if rest.strip():
                    break
            raise EquipoiseError(f"{path}, row {row} is empty; remove it")
        yield decoded


def _separator(line: str) -> str:
    """Return the separator: UCI uses semicolons and a decimal comma; the benchmarks' file is an ordinary CSV."""
    return ";" if ";" in line else ","


def _header(path: Path, lines: Iterator[str]) -> list[str]:
    line = next(lines, "")
    names = [cell.strip('"') for cell in line.split(_separator(line))]
    if len(names) < 2 or names[0] not in ("", "date"):
        raise EquipoiseError(f"{path} does not begin with a line of names: date (or nothing), then one per client")
    if len(set(names)) < len(names):
        raise EquipoiseError(f"{path} names a client twice in its first line; every column needs a different name")
    for name in names[1:]:
        text_encoding.check_name(path, name)
    return names[1:]


def _numbers(path: Path, names: list[str], lines: list[str], row: int) -> np.ndarray:
    """Parse a block of rows; errors name the row (the first line is 1) and the column."""
    separator = _separator(lines[0])
    clean = [line.replace(",", ".") for line in lines] if separator == ";" else lines
    for k, line in enumerate(clean):
        if line.count(separator) != len(names):
            raise EquipoiseError(f"{path}, row {row + k}: {line.count(separator)} values for {len(names)} clients")
    with np.errstate(over="ignore"):  # what is too large for single precision becomes infinite: an error below
        try:
            columns = range(1, len(names) + 1)
            values = np.loadtxt(clean, np.float32, delimiter=separator, usecols=columns, ndmin=2, comments=None)
        except ValueError:
            values = np.array([[_number(cell) for cell in line.split(separator)[1:]] for line in clean], np.float32)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        k, column = bad[0]
        cell = clean[k].split(separator)[1 + column]
        raise EquipoiseError(
            f"{path}, row {row + k}, column {names[column]!r}: {cell[:40]!r} is not a finite number; fix it or "
            "remove the client"
        )
    return values


def _number(cell: str) -> float:
    try:
        return np.nan if "_" in cell else float(cell)  # Python reads 1_000 as a number
    except ValueError:
        return np.nan
