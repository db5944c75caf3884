"""Samples of time series: from the series of all owners to a pool of windows with their targets, parts and scales."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from equipoise.data.calendar_inputs import calendar_inputs
from equipoise.data.clocks import local_minutes
from equipoise.data.owner_windows import OwnerSeries, OwnerWindows, windows_of
from equipoise.data.pool import Pool
from equipoise.data.series_facts import SeriesFacts
from equipoise.data.source import LoadRequest
from equipoise.data.windows import WindowSettings
from equipoise.errors import EquipoiseError

_NAMED = 5  # owners in a note


@dataclass(frozen=True)
class SeriesSet:
    """The series of all owners."""

    series: dict[str, OwnerSeries]
    "by the owner's name"
    step: int
    "minutes between two values"
    unit: str = ""
    zone: str = ""
    "time zone of the clock, if times are in UTC"
    exogenous: int = 0
    "number of exogenous series"
    known_ahead: bool = True
    "whether exogenous values are known before they happen, as those of a forecast of the weather are"


def pool_of_series(
    settings: WindowSettings, data: SeriesSet, ask: LoadRequest, newcomers: Collection[str] = (), history: int = 0
) -> Pool:
    """Return all windows of these series, as the settings ask for them.

    Args:
        settings: what a sample is.
        data: the series.
        ask: the request of the run.
        newcomers: names of owners of whom only a short history before their test part is known.
        history: the number of values in this history.
    """
    if newcomers and history < settings.reach + settings.horizon:
        raise EquipoiseError(
            f"data.unseen_history = {history} is too short: a sample reads {settings.reach} values and forecasts "
            f"{settings.horizon}, so it must be at least {settings.reach + settings.horizon}"
        )
    holidays = settings.holiday_numbers([*ask.folders, ask.folder])
    found: dict[int, OwnerWindows] = {}
    for k, (name, own) in enumerate(data.series.items()):
        windows = windows_of(name, own, settings, ask.split, data.known_ahead, history if name in newcomers else None)
        if windows is not None:
            found[k] = windows
    counts = [len(windows.asked) for windows in found.values()]
    # Filled in place, because the windows need by far the most memory.
    x = room_for(settings, sum(counts), data.exogenous)
    y = np.empty((sum(counts), settings.horizon), np.float32)
    owners, end = list(data.series.values()), 0
    for k, windows in found.items():
        begin, end = end, end + len(windows.asked)
        calendar = calendar_of(settings, owners[k].start, len(windows.measured), data.step, data.zone, holidays)
        fill_windows(x[begin:end], settings, windows, calendar, data.known_ahead)
        y[begin:end] = sliding_window_view(windows.measured, settings.horizon)[windows.asked]
    return Pool(
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        classes=None,
        owner=np.repeat(np.array(list(found), np.int32), counts),
        names=tuple(data.series),
        part=np.concatenate([np.empty(0, np.int64), *(windows.part for windows in found.values())]),
        series=_facts(settings, data, found),
        with_history=partial(pool_of_series, settings, data, ask),
    )


def pool_of_loads(settings: WindowSettings, data: SeriesSet, ask: LoadRequest, where: Path) -> Pool:
    """Return all windows, with a note about the owners who have none; it is an error if nobody has any.

    Args:
        settings: what a sample is.
        data: the series.
        ask: the request of the run.
        where: the files, for error messages.
    """
    pool = pool_of_series(settings, data, ask)
    if not len(pool):
        raise EquipoiseError(
            f"{where}: no client has training samples; each needs {settings.reach + settings.horizon} values in a row, "
            "and the training part needs values that change"
        )
    used = set(pool.owner.tolist() if pool.owner is not None else ())
    gone = [name for k, name in enumerate(pool.names) if k not in used]
    few = f"{len(gone)} clients are left out: too few values, or none that change, to train on: "
    names = ", ".join(gone[:_NAMED]) + (" ..." if len(gone) > _NAMED else "")
    return replace(pool, notes=(few + names,) if gone else ())


def room_for(settings: WindowSettings, samples: int, exogenous: int) -> np.ndarray:
    """Return room for the inputs of samples.

    Args:
        settings: what a sample is.
        samples: their number.
        exogenous: number of exogenous series.
    """
    width = settings.width(exogenous)
    return np.empty((samples, settings.window, width) if settings.sequence else (samples, width), np.float32)


def calendar_of(
    settings: WindowSettings, start: int, moments: int, step: int, zone: str, holidays: Collection[int]
) -> np.ndarray:
    """Return the calendar inputs of the moments of a series, one row each.

    Args:
        settings: which inputs there are.
        start: minutes of the first moment since 1970.
        moments: number of moments.
        step: minutes between two of them.
        zone: the time zone, if times are in UTC.
        holidays: days since 1970.
    """
    if not settings.calendar:
        return np.empty((moments, 0), np.float32)
    minutes = local_minutes(start + step * np.arange(moments), zone)
    return calendar_inputs(minutes, settings.calendar, settings.calendar_style, holidays)


def fill_windows(
    x: np.ndarray, settings: WindowSettings, windows: OwnerWindows, calendar: np.ndarray, known_ahead: bool
) -> None:
    """Write the inputs of an owner's samples.

    Args:
        x: room for them.
        settings: what a sample is.
        windows: the owner's windows.
        calendar: the calendar inputs of all moments.
        known_ahead: whether exogenous values are known before they happen.
    """
    (_fill_sequences if settings.sequence else _fill_rows)(x, settings, windows, calendar, known_ahead)


def _fill_rows(
    x: np.ndarray, settings: WindowSettings, windows: OwnerWindows, calendar: np.ndarray, known_ahead: bool
) -> None:
    """Write samples, one row each: the window, the lags, and what is outside at the time of the first target."""
    asked, window, horizon = windows.asked, settings.window, settings.horizon
    x[:, :window] = sliding_window_view(windows.filled, window)[asked - window]
    end = window
    for lag in settings.lags or ():
        x[:, end : end + horizon] = sliding_window_view(windows.filled, horizon)[asked - lag]
        end += horizon
    outside = windows.exogenous.shape[1]
    x[:, end : end + outside] = windows.exogenous[asked + known_ahead - 1]
    x[:, end + outside :] = calendar[asked]


def _fill_sequences(
    x: np.ndarray, settings: WindowSettings, windows: OwnerWindows, calendar: np.ndarray, known_ahead: bool
) -> None:
    """Write samples, one row for each value of the window: the value, and what is known of the moment after it.

    So the last row has the lags, the exogenous values and the calendar of the first target.
    """
    asked, window = windows.asked, settings.window
    values = sliding_window_view(windows.filled, window)
    x[:, :, 0] = values[asked - window]
    end = 1
    for lag in settings.lags or ():
        x[:, :, end] = values[asked + 1 - window - lag]
        end += 1
    outside = windows.exogenous.shape[1]
    x[:, :, end : end + outside] = _spans(windows.exogenous, asked + known_ahead - window, window)
    x[:, :, end + outside :] = _spans(calendar, asked + 1 - window, window)


def _spans(columns: np.ndarray, begin: np.ndarray, length: int) -> np.ndarray:
    """Return the rows in several spans of the same length, (span, row, column)."""
    return np.asarray(columns[begin[:, None] + np.arange(length)])


def _facts(settings: WindowSettings, data: SeriesSet, found: dict[int, OwnerWindows]) -> SeriesFacts:
    """Return what is known about the samples besides inputs and targets; owners without samples have no values."""
    count = len(data.series)
    lengths = np.zeros(count, np.int64)
    shift, size, until = np.zeros(count), np.ones(count), np.zeros(count, np.int64)
    for k, windows in found.items():
        lengths[k], until[k] = len(windows.measured), windows.trained_until
        shift[k], size[k] = windows.shift, windows.size
    begins = np.concatenate([[0], np.cumsum(lengths)])
    return SeriesFacts(
        names=tuple(data.series),
        step=data.step,
        horizon=settings.horizon,
        values=np.concatenate([np.empty(0, np.float32), *(windows.measured for windows in found.values())]),
        begins=begins,
        start=np.array([own.start for own in data.series.values()], np.int64),
        shift=shift,
        size=size,
        trained_until=until,
        owner=np.repeat(np.array(list(found), np.int64), [len(windows.asked) for windows in found.values()]),
        target=np.concatenate([np.empty(0, np.int64), *(begins[k] + w.asked for k, w in found.items())]),
        unit=data.unit,
        zone=data.zone,
        window=settings.reach,
    )
