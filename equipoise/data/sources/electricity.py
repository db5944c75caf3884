"""Electric loads by client, to forecast the next hours from the last ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from equipoise.data import text_encoding
from equipoise.data.archives import first_existing
from equipoise.data.cache import cached
from equipoise.data.downloads import Remote
from equipoise.data.pool import Pool
from equipoise.data.series_facts import SeriesFacts
from equipoise.data.source import DatasetStatus, LoadRequest, Source, missing_file, portion
from equipoise.data.sources.electricity_files import UCI, count_loads, read_loads
from equipoise.data.time_split import parts_in_time
from equipoise.errors import EquipoiseError
from equipoise.settings import Count

_NAMES = ["electricity.csv.gz", "electricity.csv", "electricity.zip", "electricityloaddiagrams20112014.zip"]
_NAMES += [f"{UCI}.zip", UCI, f"{UCI}.gz"]


class _Series(NamedTuple):
    """One client's series, and the windows in it."""

    scaled: np.ndarray
    asked: np.ndarray
    "the first target of each window"
    part: np.ndarray
    "0, 1 or 2 (training, validation, test) for each window"
    shift: float
    size: float
    trained: int
    "number of values in the training part"


class Electricity(Source):
    """Electric loads of hundreds of clients; the next `horizon` values are forecast from the last `window` values."""

    paper: ClassVar[str] = "Trindade, ElectricityLoadDiagrams20112014, UCI Machine Learning Repository, 2015"
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
        found = {k: known for k in range(len(names)) if (known := self._windows(series[:, k], ask.split)) is not None}
        if not found:
            raise EquipoiseError(
                f"{path}: no client has training samples; each needs {self.window + self.horizon} values "
                "in a row, and the training part needs values that change"
            )
        counts = [len(known.part) for known in found.values()]
        # Filled in place, because the windows need by far the most memory.
        x = np.empty((sum(counts), self.window), np.float32)
        y = np.empty((sum(counts), self.horizon), np.float32)
        end = 0
        for known in found.values():
            begin, end = end, end + len(known.part)
            x[begin:end] = sliding_window_view(known.scaled, self.window)[known.asked - self.window]
            y[begin:end] = sliding_window_view(known.scaled, self.horizon)[known.asked]
        gone = len(names) - len(found)
        owner = np.repeat(np.array(list(found), np.int32), counts)
        step = 60 if self.hourly else int(arrays["minutes"])
        return Pool(
            x=torch.from_numpy(x),
            y=torch.from_numpy(y),
            classes=None,
            owner=owner,
            names=tuple(names),
            part=np.concatenate([known.part for known in found.values()]),
            portion=whole,
            notes=(f"{gone} clients are left out: too few values, or none that change, to train on",) if gone else (),
            series=self._facts(tuple(names), step, found, owner),
        )

    def _facts(
        self, names: tuple[str, ...], step: int, found: "Mapping[int, _Series]", owner: np.ndarray
    ) -> SeriesFacts:
        """Return what is known about the series; of owners that are left out, there is none."""
        lengths = np.zeros(len(names), np.int64)
        lengths[list(found)] = [len(known.scaled) for known in found.values()]
        begins = np.concatenate([[0], np.cumsum(lengths)])
        scales = np.full((2, len(names)), np.nan)
        scales[:, list(found)] = np.array([(known.shift, known.size) for known in found.values()]).T
        trained = np.zeros(len(names), np.int64)
        trained[list(found)] = [known.trained for known in found.values()]
        return SeriesFacts(
            names=names,
            step=step,
            horizon=self.horizon,
            values=np.concatenate([known.scaled for known in found.values()]),
            begins=begins,
            start=np.zeros(len(names), np.int64),
            shift=scales[0],
            size=scales[1],
            trained_until=trained,
            owner=owner,
            target=np.concatenate([begins[k] + known.asked for k, known in found.items()]),
            unit="kW",
            window=self.window,
        )

    def _windows(self, series: np.ndarray, split: tuple[float, float, float]) -> "_Series | None":
        """Return the scaled series and its windows; None if nothing can be learned."""
        load = np.trim_zeros(series, "f")  # zeros before the first load are not data
        asked = np.arange(self.window, len(load) - self.horizon + 1, self.stride)
        part = parts_in_time(asked, asked + self.horizon - 1, split)
        if not (part == 0).any():
            return None
        trained = int(asked[part == 0].max() + self.horizon)
        past = load[:trained].astype(np.float64)  # scales come from the training part alone
        if past.min() == past.max():
            return None
        shift, size = (past.min(), np.ptp(past)) if self.scale == "minmax" else (past.mean(), past.std())
        scaled = np.asarray((load - shift) / size, dtype=np.float32)
        return _Series(scaled, asked[part >= 0], part[part >= 0], float(shift), float(size), trained)

    def next_input(self, series: SeriesFacts, owner: int, place: int) -> np.ndarray:
        known = series.values[max(place - self.window, int(series.begins[owner])) : place]
        if len(known) < self.window or np.isnan(known).any():
            raise EquipoiseError(
                f"the last {self.window} values of {series.names[owner]!r} are not all known, so the model has no input"
            )
        return known

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
