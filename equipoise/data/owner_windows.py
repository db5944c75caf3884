"""The windows of one owner's time series: their places, their parts, their scales, and what must be known for each."""

from dataclasses import dataclass

import numpy as np

from equipoise.data.time_split import parts_at_cut, parts_in_time, recent_parts
from equipoise.data.windows import WindowSettings
from equipoise.errors import EquipoiseError

Split = tuple[float, float, float]


@dataclass(frozen=True)
class OwnerSeries:
    """The series of one owner in the data's own unit, with one value for each moment."""

    measured: np.ndarray
    "the values; NaN where one is missing"
    start: int
    "minutes of the first value since 1970: in UTC if there is a time zone, else on the clock of its place"
    before: int
    "number of moments of the owner's file before the first value"
    moments: int
    "number of moments of the owner's file"
    filled: np.ndarray | None = None
    "the values with short gaps filled, for inputs only; None: as measured"
    exogenous: np.ndarray | None = None
    "other series that are inputs, (moment, series); NaN where a value is missing"
    exogenous_filled: np.ndarray | None = None
    "those with short gaps filled; None: as they are"


@dataclass(frozen=True)
class OwnerWindows:
    """The windows of one owner."""

    asked: np.ndarray
    "place of the first value that each window forecasts"
    part: np.ndarray
    "0, 1 or 2: training, validation, test"
    trained_until: int
    "number of values of the training part"
    shift: float
    size: float
    measured: np.ndarray
    "the scaled series"
    filled: np.ndarray
    "the scaled series with short gaps filled"
    exogenous: np.ndarray
    "scaled exogenous series with short gaps filled, (moment, series)"


def windows_of(
    name: str, own: OwnerSeries, settings: WindowSettings, split: Split, known_ahead: bool, history: int | None
) -> OwnerWindows | None:
    """Return the windows of one owner, scaled by the training part; None if nothing can be learned from them.

    Args:
        name: the owner's name, for error messages.
        own: the owner's series.
        settings: what a window is.
        split: the fractions of training, validation and test.
        known_ahead: whether exogenous values are known before they happen.
        history: the number of values before the test part that may be used; None: all.
    """
    cut, end = _test_part(name, own, settings)
    measured = own.measured[:end]  # nothing after the test part is used
    first = np.arange(settings.reach, len(measured) - settings.horizon + 1, settings.stride)
    last = first + settings.horizon - 1
    part = parts_in_time(first, last, split) if cut is None else parts_at_cut(first, last, cut, split)
    since = 0
    if history is not None:
        tested = int(first[part == 2].min(initial=len(measured)))
        since = max(0, tested - history)
        part = recent_parts(part, first - settings.reach, first, last, range(since, tested), split)
    if not (part == 0).any():
        return None
    until = int(first[part == 0].max()) + settings.horizon
    if not _changes(measured[since:until]):
        return None
    filled = measured if own.filled is None else own.filled[:end]
    gaps = own.exogenous[:end] if own.exogenous is not None else np.empty((len(measured), 0))
    exogenous = gaps if own.exogenous_filled is None else own.exogenous_filled[:end]
    usable = part >= 0
    usable[usable] = _known(settings, known_ahead, first[usable], (measured, filled), (gaps, exogenous))
    if not (part[usable] == 0).any():
        return None
    shift, size = _scale(settings.scale, measured[since:until])
    scaled = _scaled(measured, shift, size)
    return OwnerWindows(
        asked=first[usable],
        part=part[usable],
        trained_until=until,
        shift=shift,
        size=size,
        measured=scaled,
        filled=scaled if filled is measured else _scaled(filled, shift, size),
        exogenous=_each_scaled(settings.scale, gaps[since:until], exogenous),
    )


def _test_part(name: str, own: OwnerSeries, settings: WindowSettings) -> tuple[int | None, int]:
    """Return where the test part begins, None if the split says it, and where it ends."""
    if settings.cut is None:
        return None, len(own.measured)
    cut, span = round(settings.cut * own.moments), settings.test_span
    if span is not None and cut + span > own.moments:
        raise EquipoiseError(
            f"data.cut = {settings.cut:g} leaves {own.moments - cut} values of {name!r} for the test part, not "
            f"data.test_span = {span}; cut earlier, or test on fewer values"
        )
    end = own.moments if span is None else cut + span
    return cut - own.before, max(0, end - own.before)


def _changes(past: np.ndarray) -> bool:
    known = past[~np.isnan(past)]
    return bool(len(known) and known.min() < known.max())


def _scale(kind: str, past: np.ndarray) -> tuple[float, float]:
    """Return shift and size of a series, from its training part alone; the size of one that does not change is 1."""
    known = past[~np.isnan(past)].astype(np.float64)
    if kind == "none" or not len(known):
        return 0.0, 1.0
    shift, size = (known.min(), np.ptp(known)) if kind == "minmax" else (known.mean(), known.std())
    return float(shift), float(size) or 1.0


def _scaled(series: np.ndarray, shift: float, size: float) -> np.ndarray:
    return np.asarray((series.astype(np.float64) - shift) / size, dtype=np.float32)


def _each_scaled(kind: str, past: np.ndarray, series: np.ndarray) -> np.ndarray:
    """Return series side by side, each scaled by its own past."""
    scaled = [_scaled(column, *_scale(kind, known)) for column, known in zip(series.T, past.T, strict=True)]
    return np.stack(scaled, axis=1) if scaled else series.astype(np.float32)


def _known(
    settings: WindowSettings,
    known_ahead: bool,
    first: np.ndarray,
    series: tuple[np.ndarray, np.ndarray],
    exogenous: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Tell for each window whether all its values are known, at the time of the forecast.

    Targets must have been measured. Inputs may lie in a short gap that was filled, but the value after a gap must not
    be one that is forecast: so the last value before the forecast must have been measured.

    Args:
        settings: what a window is.
        known_ahead: whether exogenous values are known before they happen.
        first: the place of the first value that each window forecasts.
        series: the values as measured, and with short gaps filled.
        exogenous: the exogenous series as they were given, and with short gaps filled.
    """
    measured, filled = (np.isnan(values) for values in series)
    gaps, outside = (np.isnan(values).any(1) for values in exogenous)
    window, horizon = settings.window, settings.horizon
    # Places and lengths of all ranges in which nothing may be missing.
    needs = [(filled, first - window, window), (measured, first - 1, 1), (measured, first, horizon)]
    if settings.sequence:
        needs += [(filled, first + 1 - window - lag, window) for lag in settings.lags or ()]
        needs += [(outside, first + known_ahead - window, window)]
    else:
        needs += [(filled, first - lag, horizon) for lag in settings.lags or ()]
        needs += [(outside, first + known_ahead - 1, 1)]
    if not known_ahead:
        needs += [(gaps, first - 1, 1)]
    free = [_free(missing, begin, length) for missing, begin, length in needs]
    return np.asarray(np.all(free, axis=0))


def _free(missing: np.ndarray, begin: np.ndarray, length: int) -> np.ndarray:
    """Tell for each range of places whether nothing in it is missing."""
    count = np.concatenate([[0], np.cumsum(missing)])
    return np.asarray(count[begin + length] == count[begin])
