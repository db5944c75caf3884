"""The input from which what follows a time series is forecast."""

from pathlib import Path

import numpy as np

from equipoise.data.owner_windows import OwnerWindows
from equipoise.data.series_facts import SeriesFacts
from equipoise.data.time_grid import fill_gaps
from equipoise.data.window_samples import calendar_of, fill_windows, room_for
from equipoise.data.windows import WindowSettings
from equipoise.errors import EquipoiseError


def input_at(settings: WindowSettings, series: SeriesFacts, owner: int, place: int) -> np.ndarray:
    """Return the input of a forecast that begins at a place of an owner's series, perhaps one beyond its last value.

    Args:
        settings: what a sample is.
        series: the series.
        owner: the owner, as an index in `series.names`.
        place: index in `series.values` of the first value to forecast.
    """
    if (names := getattr(settings, "exogenous", None)) is not None:
        raise EquipoiseError(
            f"a forecast beyond the data needs {', '.join(names)} (data.exogenous) after their end, which are not "
            "known; forecast the test part instead"
        )
    begin = int(series.begins[owner])
    asked = place - begin
    past = series.values[begin:place]
    name = series.names[owner]
    if len(past) < settings.reach:
        raise EquipoiseError(
            f"only {len(past)} values of {name!r} are known, and the model reads the last {settings.reach}"
        )
    if np.isnan(past[-1]):
        raise EquipoiseError(f"the last value of {name!r} is missing, so it is not known what follows")
    if settings.fills:
        past = past.copy()
        fill_gaps(past, settings.fills)
    # Nothing of the values that are forecast is read, but the windows want room for them.
    known = np.concatenate([past, np.zeros(settings.horizon, np.float32)])
    windows = OwnerWindows(
        asked=np.array([asked]),
        part=np.array([2]),
        trained_until=int(series.trained_until[owner]),
        shift=float(series.shift[owner]),
        size=float(series.size[owner]),
        measured=known,
        filled=known,
        exogenous=np.empty((len(known), 0), np.float32),
    )
    holidays = settings.holiday_numbers([Path.cwd()])
    calendar = calendar_of(settings, int(series.start[owner]), len(known), series.step, series.zone, holidays)
    x = room_for(settings, 1, 0)
    fill_windows(x, settings, windows, calendar, known_ahead=True)
    if np.isnan(x).any():
        raise EquipoiseError(
            f"the model has no input for {name!r}: some of the last {settings.reach} values are "
            "missing; fill them in, or set data.gaps = 'interpolate' before the run"
        )
    return np.asarray(x[0])
