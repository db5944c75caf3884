"""The scale of one client's time series, as it travels with the client's model."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from equipoise.data.federation import Federation
from equipoise.data.statistics import owned
from equipoise.settings import Count, Number, Positive, Settings


class SeriesScale(Settings):
    """How a client's values were scaled for its model, and what the model forecasts."""

    shift: Number
    "a value in the data's own unit is scaled value * size + shift"
    size: Positive
    "see shift"
    horizon: Count
    "number of values that the model forecasts"
    window: Annotated[int, Field(ge=0)] = 0
    "number of values before the first forecast one that its inputs are made of; 0 if unknown"
    step: Count = 60
    "minutes between two values"
    unit: str = ""
    "unit of the data, such as kW"

    def scaled(self, values: Any) -> Any:
        """Return values of the data's own unit as the model takes them."""
        return (values - self.shift) / self.size

    def unscaled(self, scaled: Any) -> Any:
        """Return the model's values in the data's own unit."""
        return scaled * self.size + self.shift


def client_scale(federation: Federation, who: int) -> SeriesScale | None:
    """Return the scale of a client, or None if its samples are not of one time series."""
    series = federation.series
    owners: list[int] = [] if series is None else np.unique(series.owner[owned(federation, who)]).tolist()
    if series is None or len(owners) != 1:
        return None
    [owner] = owners
    return SeriesScale(
        shift=float(series.shift[owner]),
        size=float(series.size[owner]),
        horizon=series.horizon,
        window=series.window,
        step=series.step,
        unit=series.unit,
    )
