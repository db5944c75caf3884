"""Electricity loads by client: forecast the next hours from the last ones."""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal, cast

import numpy as np
import torch

from equipoise.data import text
from equipoise.data.archive import first_existing, opened, told
from equipoise.data.cache import Arrays, cached
from equipoise.data.chronology import nobody, parts_in_time
from equipoise.data.download import Remote
from equipoise.data.pool import Pool
from equipoise.data.source import Found, Progress, Request, Source, missing, portion
from equipoise.errors import EquipoiseError
from equipoise.settings import Count

_UCI = "LD2011_2014.txt"
_NAMES = ["electricity.csv.gz", "electricity.csv", "electricity.zip", "electricityloaddiagrams20112014.zip"]
_NAMES += [f"{_UCI}.zip", _UCI, f"{_UCI}.gz"]
_LINES = 2000  # parsed together


class Electricity(Source):
    """Electric load of hundreds of clients; from the last `window` values forecast the next `horizon`."""

    paper: ClassVar[str] = "Trindade, ElectricityLoadDiagrams20112014, UCI Machine Learning Repository, 2015"
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            "electricity.zip",
            ("https://archive.ics.uci.edu/static/public/321/electricityloaddiagrams20112014.zip",),
        ),
    )

    window: Count = 24
    "values that the model sees"
    horizon: Count = 1
    "values that it forecasts"
    stride: Count = 1
    "values from one window to the next"
    scale: Literal["minmax", "standard"] = "minmax"
    "how each client's series is scaled, by its training part alone: to 0..1, or to mean 0 and deviation 1"
    hourly: bool = True
    "means over the hour where the file has values every 15 minutes"

    def load(self, ask: Request) -> Pool:
        path = _find(ask.folder)
        if path is None:
            raise missing(_NAMES[0], _folders(ask.folder), type(self))
        arrays = cached("electricity", [path], lambda: _decode(path, ask.progress))
        names, series = text.names_from_bytes(arrays["names"]), arrays["series"]
        whole = _portion(len(series), len(names), int(arrays["minutes"]))
        if self.hourly and arrays["minutes"] == 15:
            series = series[: len(series) // 4 * 4].reshape(-1, 4, len(names)).mean(1, dtype=np.float64)
        xs, ys, owner, parts, flat = [], [], [], [], 0
        for column, name in enumerate(names):
            load = np.trim_zeros(series[:, column], "f")  # zeros before the first load are no data
            if not len(load):
                flat += 1
                continue
            asked = np.arange(self.window, len(load) - self.horizon + 1, self.stride)
            part = parts_in_time(asked, asked + self.horizon - 1, ask.split)
            if not (part == 0).any():
                raise EquipoiseError(
                    f"{path}: client {name!r} has {len(load)} values, too few for a training sample with "
                    f"data.window = {self.window} and data.horizon = {self.horizon}"
                )
            scaled = self._scaled(load, past=load[: asked[part == 0].max() + self.horizon])
            if scaled is None:
                flat += 1
                continue
            asked, part = asked[part >= 0], part[part >= 0]
            xs.append(scaled[asked[:, None] + np.arange(-self.window, 0)])
            ys.append(scaled[asked[:, None] + np.arange(self.horizon)])
            owner.append(np.full(len(asked), column, np.int32))
            parts.append(part)
        if not xs:
            raise nobody("series", self.window + self.horizon)
        notes = (f"{flat} clients are left out: their load does not change in the training part",) if flat else ()
        return Pool(
            x=torch.from_numpy(np.concatenate(xs)),
            y=torch.from_numpy(np.concatenate(ys)),
            classes=None,
            owner=np.concatenate(owner),
            names=tuple(names),
            part=np.concatenate(parts),
            portion=whole,
            notes=notes,
        )

    def _scaled(self, series: np.ndarray, past: np.ndarray) -> np.ndarray | None:
        """By the training part alone; None where that part is constant."""
        past = past.astype(np.float64)
        if past.min() == past.max():
            return None
        shift, size = (past.min(), np.ptp(past)) if self.scale == "minmax" else (past.mean(), past.std())
        return np.asarray((series - shift) / size, dtype=np.float32)

    def look(self, folder: Path) -> Found | None:
        path = _find(folder)
        if path is None:
            return None
        with _lines(path) as lines:
            names, minutes, rows = _header(path, lines), 0, 0
            for rows, line in enumerate(lines, 1):
                if rows <= 2:
                    minutes = _minute(path, line, 1 + rows) - minutes
        columns, whole = _whole(minutes)
        return Found(path, rows * len(names), whole * columns, "values")


def _folders(folder: Path) -> list[Path]:
    return [folder, folder / "electricity"]


def _find(folder: Path) -> Path | None:
    return first_existing(_folders(folder), _NAMES)


def _whole(minutes: int) -> tuple[int, int]:
    """Clients and moments of the whole data set: UCI's file, or the hourly one of the forecasting benchmarks."""
    return (370, 140_256) if minutes == 15 else (321, 26_304)


def _portion(moments: int, clients: int, minutes: int) -> str:
    columns, rows = _whole(minutes)
    return ", ".join(filter(None, (portion(clients, columns, "clients"), portion(moments, rows, "moments"))))


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[str]]:
    """The lines of the table, packed or not."""
    if path.suffix != ".zip":
        with opened(path) as file:
            yield _decoded(path, file)
        return
    with told(path), zipfile.ZipFile(path) as archive:
        inside = [n for n in archive.namelist() if Path(n).name == _UCI and not n.startswith("__MACOSX")]
        if not inside:
            raise EquipoiseError(f"{path} holds no {_UCI}; it is not UCI's archive")
        with archive.open(inside[0]) as member:
            yield _decoded(path, cast(BinaryIO, member))


def _decoded(path: Path, file: BinaryIO) -> Iterator[str]:
    while line := file.readline(1 << 20):
        try:
            if text_line := line.decode("utf-8-sig").rstrip("\r\n"):
                yield text_line
        except UnicodeDecodeError:
            raise EquipoiseError(f"{path} is not a text file in UTF-8") from None


def _separator(line: str) -> str:
    """UCI separates by semicolons and writes a decimal comma; the benchmarks' file is an ordinary CSV."""
    return ";" if ";" in line else ","


def _header(path: Path, lines: Iterator[str]) -> list[str]:
    line = next(lines, "")
    names = [cell.strip('"') for cell in line.split(_separator(line))]
    if len(names) < 2 or names[0] not in ("", "date"):
        raise EquipoiseError(f"{path} does not begin with a line of names: date (or nothing), then one a client")
    if len(set(names)) < len(names):
        raise EquipoiseError(f"{path} names a client twice in its first line; every column needs a name of its own")
    return names[1:]


def _minute(path: Path, line: str, row: int) -> int:
    """The time in a row's first cell, in minutes."""
    cell = line.split(_separator(line), 1)[0].strip('"')
    try:
        clock = datetime.fromisoformat(cell).replace(tzinfo=None)  # as written: no daylight saving where we are
        return int((clock - datetime(1970, 1, 1)).total_seconds() // 60)
    except (ValueError, OverflowError):
        raise EquipoiseError(f"{path}, row {row}: {cell!r} is not a date and time") from None


def _decode(path: Path, progress: Progress) -> Arrays:
    with _lines(path) as lines:
        names = _header(path, lines)
        blocks: list[np.ndarray] = []
        minutes: list[int] = []
        row = 2
        while block := list(islice(lines, _LINES)):
            if not minutes:
                minutes = [_minute(path, line, row + k) for k, line in enumerate(block[:2])]
            blocks.append(_numbers(path, names, block, row))
            row += len(block)
            progress(row, max(row, 140_257))
    step = minutes[1] - minutes[0] if len(minutes) > 1 else 0
    if step not in (15, 60):
        raise EquipoiseError(f"{path} has a value every {step} minutes; there must be one every 15 or every 60")
    return {"series": np.concatenate(blocks), "names": text.names_to_bytes(names), "minutes": np.array(step)}


def _numbers(path: Path, names: list[str], lines: list[str], row: int) -> np.ndarray:
    """A block of rows as numbers; what is wrong is told with its row (the first line is 1) and column."""
    separator = _separator(lines[0])
    clean = [line.replace(",", ".") for line in lines] if separator == ";" else lines
    for k, line in enumerate(clean):
        if line.count(separator) != len(names):
            raise EquipoiseError(f"{path}, row {row + k}: {line.count(separator)} values for {len(names)} clients")
    try:
        values = np.loadtxt(clean, delimiter=separator, usecols=range(1, len(names) + 1), ndmin=2, comments=None)
    except ValueError:
        values = np.array([[_number(cell) for cell in line.split(separator)[1:]] for line in clean])
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        k, column = bad[0]
        cell = clean[k].split(separator)[1 + column]
        raise EquipoiseError(
            f"{path}, row {row + k}, column {names[column]!r}: {cell!r} is not a finite number; put it right or leave "
            "the client out"
        )
    return values.astype(np.float32)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan
