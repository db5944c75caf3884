"""The input from which what follows a time series is forecast."""

from pathlib import Path

import numpy as np

from equipoise.data.owner_windows import OwnerWindows
from equipoise.data.series_facts import SeriesFacts
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
    needed = past[-settings.reach :]
    if len(needed) < settings.reach or np.isnan(needed).any():
        raise EquipoiseError(
            f"the last {settings.reach} values of {series.names[owner]!r} are not all known, so the model has no input"
        )
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
    return np.asarray(x[0])
