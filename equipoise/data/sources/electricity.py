"""Electric loads by client, to forecast the next hours from the last ones."""

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from equipoise.data import text_encoding
from equipoise.data.archives import first_existing
from equipoise.data.cache import cached
from equipoise.data.downloads import Remote
from equipoise.data.pool import Pool
from equipoise.data.source import DatasetStatus, LoadRequest, Source, missing_file, portion
from equipoise.data.sources.electricity_files import UCI, count_loads, read_loads
from equipoise.data.time_split import parts_in_time
from equipoise.errors import EquipoiseError
from equipoise.settings import Count

_NAMES = ["electricity.csv.gz", "electricity.csv", "electricity.zip", "electricityloaddiagrams20112014.zip"]
_NAMES += [f"{UCI}.zip", UCI, f"{UCI}.gz"]


class Electricity(Source):
    """Electric loads of hundreds of clients; the next `horizon` values are forecast from the last `window` values."""

    paper: ClassVar[str] = "Trindade, ElectricityLoadDiagrams20112014, UCI Machine Learning Repository, 2015"
    chronological: ClassVar[bool] = True
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            "electricity.zip",
            ("https://archive.ics.uci.edu/static/public/321/electricityloaddiagrams20112014.zip",),
        ),
    )

    window: Count = 24
    "number of values that the model reads"
    horizon: Count = 1
    "number of values that the model forecasts"
    stride: Count = 1
    "number of values from the start of one window to the next"
    scale: Literal["minmax", "standard"] = "minmax"
    "scaling of each client's series, from its training part alone: to 0..1, or to mean 0 and standard deviation 1"
    hourly: bool = True
    "whether values every 15 minutes are averaged over the hour"

    def load(self, ask: LoadRequest) -> Pool:
        path = _find(ask.folder)
        if path is None:
            raise missing_file(_NAMES[0], _folders(ask.folder), type(self))
        arrays = cached("electricity", [path], lambda: read_loads(path, ask.progress))
        names, series = text_encoding.names_from_bytes(arrays["names"]), arrays["series"]
        whole = _portion(len(series), len(names), int(arrays["minutes"]))
        if self.hourly and arrays["minutes"] == 15:
            series = series[: len(series) // 4 * 4].reshape(-1, 4, len(names)).mean(1, dtype=np.float64)
        windows = {k: found for k in range(len(names)) if (found := self._windows(series[:, k], ask.split)) is not None}
        if not windows:
            raise EquipoiseError(
                f"{path}: no client has training samples; each needs {self.window + self.horizon} values "
                "in a row, and the training part needs values that change"
            )
        counts = [len(part) for _, _, part in windows.values()]
        # Filled in place, because the windows need by far the most memory.
        x = np.empty((sum(counts), self.window), np.float32)
        y = np.empty((sum(counts), self.horizon), np.float32)
        end = 0
        for scaled, asked, part in windows.values():
            begin, end = end, end + len(part)
            x[begin:end] = sliding_window_view(scaled, self.window)[asked - self.window]
            y[begin:end] = sliding_window_view(scaled, self.horizon)[asked]
        gone = len(names) - len(windows)
        return Pool(
            x=torch.from_numpy(x),
            y=torch.from_numpy(y),
            classes=None,
            owner=np.repeat(np.array(list(windows), np.int32), counts),
            names=tuple(names),
            part=np.concatenate([part for _, _, part in windows.values()]),
            portion=whole,
            notes=(f"{gone} clients are left out: too few values, or none that change, to train on",) if gone else (),
        )

    def _windows(
        self, series: np.ndarray, split: tuple[float, float, float]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return the scaled series, the first target of each window, and its part; None if nothing can be learned."""
        load = np.trim_zeros(series, "f")  # zeros before the first load are not data
        asked = np.arange(self.window, len(load) - self.horizon + 1, self.stride)
        part = parts_in_time(asked, asked + self.horizon - 1, split)
        if not (part == 0).any():
            return None
        scaled = self._scaled(load, past=load[: asked[part == 0].max() + self.horizon])
        return None if scaled is None else (scaled, asked[part >= 0], part[part >= 0])

    def _scaled(self, series: np.ndarray, past: np.ndarray) -> np.ndarray | None:
        """Scale the series by its training part `past` alone; return None if that part is constant."""
        past = past.astype(np.float64)
        if past.min() == past.max():
            return None
        shift, size = (past.min(), np.ptp(past)) if self.scale == "minmax" else (past.mean(), past.std())
        return np.asarray((series - shift) / size, dtype=np.float32)

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
