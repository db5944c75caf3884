"""Electric loads by client, to forecast the next hours from the last ones."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from equipoise.data import text_encoding
from equipoise.data.archives import first_existing
from equipoise.data.cache import cached
from equipoise.data.downloads import Remote
from equipoise.data.next_window import input_at
from equipoise.data.owner_windows import OwnerSeries
from equipoise.data.pool import Pool
from equipoise.data.series_facts import SeriesFacts
from equipoise.data.source import DatasetStatus, LoadRequest, Source, missing_file, portion
from equipoise.data.sources.electricity_files import UCI, count_loads, read_loads
from equipoise.data.window_samples import SeriesSet, pool_of_loads
from equipoise.data.windows import WindowSettings

_NAMES = ["electricity.csv.gz", "electricity.csv", "electricity.zip", "electricityloaddiagrams20112014.zip"]
_NAMES += [f"{UCI}.zip", UCI, f"{UCI}.gz"]


class Electricity(WindowSettings, Source):
    """Electric loads of hundreds of clients; the next `horizon` values are forecast from the last `window` values."""

    paper: ClassVar[str] = "Trindade, ElectricityLoadDiagrams20112014, UCI Machine Learning Repository, 2015"
    chronological: ClassVar[bool] = True
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            "electricity.zip",
            ("https://archive.ics.uci.edu/static/public/321/electricityloaddiagrams20112014.zip",),
        ),
    )

    hourly: bool = True
    "whether values every 15 minutes are averaged over the hour"

    def load(self, ask: LoadRequest) -> Pool:
        path = _find(ask.folder)
        if path is None:
            raise missing_file(_NAMES[0], _folders(ask.folder), type(self))
        arrays = cached("electricity", [path], lambda: read_loads(path, ask.progress))
        names, series, step = text_encoding.names_from_bytes(arrays["names"]), arrays["series"], int(arrays["minutes"])
        whole = _portion(len(series), len(names), step)
        if self.hourly and step == 15:
            series, step = series[: len(series) // 4 * 4].reshape(-1, 4, len(names)).mean(1, dtype=np.float64), 60
        start = int(arrays["start"])
        owners = {name: _owner(series[:, k], start, step) for k, name in enumerate(names)}
        return replace(pool_of_loads(self, SeriesSet(owners, step, unit="kW"), ask, path), portion=whole)

    def next_input(self, series: SeriesFacts, owner: int, place: int) -> np.ndarray:
        return input_at(self, series, owner, place)

    def look(self, folder: Path) -> DatasetStatus | None:
        path = _find(folder)
        return None if path is None else self.look_at(path)

    def look_at(self, path: Path) -> DatasetStatus:
        clients, moments, minutes = count_loads(path)
        columns, rows = _whole(minutes)
        return DatasetStatus(path, min(clients, columns) * min(moments, rows), columns * rows, "values")

    def verify(self, ask: LoadRequest) -> None:
        if (path := _find(ask.folder)) is not None:
            cached("electricity", [path], lambda: read_loads(path, ask.progress))


def _owner(series: np.ndarray, start: int, step: int) -> OwnerSeries:
    """Return the series of a client; zeros before the first load are not data."""
    load = np.trim_zeros(series, "f")
    before = len(series) - len(load)
    return OwnerSeries(load, start + before * step, before, len(series))


def _folders(folder: Path) -> list[Path]:
    return [folder, folder / "electricity"]


def _find(folder: Path) -> Path | None:
    return first_existing(_folders(folder), _NAMES)


def _whole(minutes: int) -> tuple[int, int]:
    """Return clients and moments of the full data set: UCI's file, or the hourly one of forecasting benchmarks."""
    return (370, 140_256) if minutes == 15 else (321, 26_304)


def _portion(moments: int, clients: int, minutes: int) -> str:
    columns, rows = _whole(minutes)
    return ", ".join(filter(None, (portion(clients, columns, "clients"), portion(moments, rows, "moments"))))
