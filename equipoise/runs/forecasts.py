"""Forecasts of one client in the data's own unit, with intervals, times, and what came of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise.data.config import DataSection
from equipoise.data.federation import Federation
from equipoise.data.series_facts import SeriesFacts
from equipoise.data.statistics import owned
from equipoise.errors import EquipoiseError
from equipoise.evaluation.conformal import check_level, fewest_samples
from equipoise.evaluation.forecaster import Forecaster
from equipoise.torch_device import one_thread
from equipoise.training.task import Task

COLUMNS = ("client", "issued", "time", "step", "forecast", "lower", "upper", "actual", "naive_weekly")
"""Columns of a table of forecasts."""


@dataclass(frozen=True, repr=False)
class ClientForecasts:
    """The forecasts of one model for one client: one row per window, one column per step of the horizon."""

    client: str
    unit: str
    level: float
    "probability of the intervals"
    issued: tuple[datetime, ...]
    "the time of each window's last known value, on the clock of its place"
    times: tuple[tuple[datetime, ...], ...]
    "the times of each window's forecast values"
    forecast: np.ndarray
    lower: np.ndarray
    "lower ends of the intervals; infinite if the client has too few validation samples"
    upper: np.ndarray
    actual: np.ndarray
    "what came of the forecasts; NaN where that is not known"
    naive_weekly: np.ndarray
    "the values one week before; NaN where there is none"
    validation: int
    "number of the client's validation samples, which intervals are made of"

    @property
    def why_infinite(self) -> str | None:
        """Return why intervals are infinite, in one sentence, or None if they are not."""
        fewest = fewest_samples(self.level)
        if self.validation >= fewest:
            return None
        return (
            f"the intervals of {self.client} are infinite: it has {self.validation} validation samples, and a level of "
            f"{self.level:g} needs {fewest}"
        )

    def lines(self) -> Iterator[list[Any]]:
        """Yield the cells of a table with the columns `COLUMNS`, one line per window and step."""
        figures = (self.forecast, self.lower, self.upper, self.actual, self.naive_weekly)
        for row, (issued, times) in enumerate(zip(self.issued, self.times, strict=True)):
            for k, time in enumerate(times):
                cells = (float(table[row, k]) for table in figures)
                shown = issued.isoformat(" "), time.isoformat(" ")
                yield [self.client, *shown, k + 1, *(None if np.isnan(cell) else cell for cell in cells)]

    def beside_each_other(self, days: float) -> list[int]:
        """Return windows of the last days, in order, of which no two forecast the same value."""
        chosen: list[int] = []
        for row in sorted(range(len(self.times)), key=self.times.__getitem__, reverse=True):
            if not chosen or self.times[row][-1] < self.times[chosen[-1]][0]:
                chosen.append(row)
        last = self.times[chosen[0]][0] if chosen else None
        span = timedelta(days=days)
        return [row for row in reversed(chosen) if last is not None and last - self.times[row][0] < span]

    def __repr__(self) -> str:
        windows, steps = self.forecast.shape
        return f"ClientForecasts({self.client}: {windows} windows of {steps} steps{self.unit and ', ' + self.unit})"


def forecast_series(federation: Federation) -> SeriesFacts:
    """Return the time series of a federation, or raise an error if its samples are no windows of any."""
    if federation.series is None:
        raise EquipoiseError(
            "the run does not forecast time series; only runs on time series, such as those of the data set "
            "'electricity', have forecasts"
        )
    return federation.series


def window_forecasts(task: Task, module: nn.Module, federation: Federation, who: int, level: float) -> ClientForecasts:
    """Forecast a client's test samples.

    Args:
        task: the task that the module was trained for.
        module: the module that the client predicts with.
        federation: the clients and their data.
        who: the client.
        level: the probability of the intervals.
    """
    check_level(level)
    series, samples = forecast_series(federation), federation.test[who]
    actual = federation.y.double().numpy()[samples].reshape(len(samples), -1)
    x = federation.gather(torch.from_numpy(samples))[0]
    return _forecasts(Forecaster(task, module, federation, who, level), x, series, samples, actual, level, who)


def next_forecasts(
    task: Task, module: nn.Module, federation: Federation, who: int, level: float, data: DataSection
) -> ClientForecasts:
    """Forecast the values that follow the end of a client's series.

    Args:
        task: the task that the module was trained for.
        module: the module that the client predicts with.
        federation: the clients and their data.
        who: the client.
        level: the probability of the intervals.
        data: the section [data] of the run, which makes the inputs from the last known values.
    """
    check_level(level)
    series, owners = forecast_series(federation), np.unique(forecast_series(federation).owner[owned(federation, who)])
    if len(owners) != 1:
        raise EquipoiseError(
            f"client {federation.names[who]!r} has samples of {len(owners)} time series, so nothing follows its data; "
            "leave out --next, or divide the data with data.partition = 'natural'"
        )
    end = series.begins[owners + 1]
    ahead = replace(series, owner=owners, target=end)
    x = torch.from_numpy(data.next_input(series, int(owners[0]), int(end[0])))[None].to(task.dtype)
    unknown = np.full((1, series.horizon), np.nan)
    return _forecasts(Forecaster(task, module, federation, who, level), x, ahead, np.array([0]), unknown, level, who)


def _forecasts(
    forecaster: Forecaster,
    x: torch.Tensor,
    series: SeriesFacts,
    samples: np.ndarray,
    actual: np.ndarray,
    level: float,
    who: int,
) -> ClientForecasts:
    with one_thread():
        found = forecaster.forecast(x)
    owners = series.owner[samples]

    def own(scaled: np.ndarray) -> np.ndarray:
        return series.unscaled(scaled.astype(np.float64), owners[:, None])

    places = list(zip(owners.tolist(), series.target[samples].tolist(), strict=True))
    return ClientForecasts(
        client=forecaster.federation.names[who],
        unit=series.unit,
        level=level,
        issued=tuple(series.time(owner, place - 1) for owner, place in places),
        times=tuple(tuple(series.time(owner, place + k) for k in range(series.horizon)) for owner, place in places),
        forecast=own(found.point),
        lower=own(found.lower),
        upper=own(found.upper),
        actual=own(actual),
        naive_weekly=own(series.naive("weekly", samples)),
        validation=len(forecaster.federation.validation[who]),
    )
