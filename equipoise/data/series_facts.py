"""What is known about samples of time series besides inputs and targets: the series, their times and scales."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import numpy as np

from equipoise.data.clocks import local_minutes

Naive = Literal["last", "daily", "weekly"]
"""Forecasts that need no model: the last known value, the value one day ago, the value one week ago."""
_DAY = 24 * 60  # minutes
_EPOCH = datetime(1970, 1, 1)


@dataclass(frozen=True, repr=False)
class SeriesFacts:
    """The scaled series of all owners, one after the other, and the place of each sample's first target in them."""

    names: tuple[str, ...]
    "the owners, as in the pool"
    step: int
    "minutes between two values"
    horizon: int
    "number of values that a sample forecasts"
    values: np.ndarray
    "the scaled series of all owners, in float32; NaN where a value is missing"
    begins: np.ndarray
    "index in `values` of each owner's first value, and, last, the number of values"
    start: np.ndarray
    "minutes since 1970 of each owner's first value: in UTC if there is a `zone`, else on the clock of its place"
    shift: np.ndarray
    "of each owner: a value in the data's own unit is scaled value * size + shift"
    size: np.ndarray
    "see shift"
    trained_until: np.ndarray
    "of each owner, the number of its values that belong to its training part; scales come from these alone"
    owner: np.ndarray
    "the owner of each sample, as an index in `names`"
    target: np.ndarray
    "index in `values` of each sample's first target"
    unit: str = ""
    "unit of the data, such as kW, for tables and plots"
    zone: str = ""
    "time zone of the place, such as Europe/Lisbon; empty where the clock has no daylight saving"
    window: int = 0
    "number of values before the first target that inputs are made of; 0 where that is not known"

    def season(self, kind: Naive) -> int:
        """Return how many values ago the naive forecast looks; for "last" one."""
        days = {"last": 0, "daily": 1, "weekly": 7}[kind]
        return max(1, days * _DAY // self.step)

    def naive(self, kind: Naive, samples: np.ndarray) -> np.ndarray:
        """Return the naive forecasts of these samples, scaled, one row each; NaN where the series is too short.

        Args:
            kind: which value is repeated.
            samples: indices of samples.
        """
        season = self.season(kind)
        ahead = np.arange(self.horizon)
        back = (ahead // season + 1) * season - ahead  # whole seasons, so that only known values are used
        places = self.target[samples][:, None] - back
        known = places >= self.begins[self.owner[samples]][:, None]
        return np.asarray(np.where(known, self.values[np.where(known, places, 0)], np.float32(np.nan)))

    def naive_error(self, owner: int, kind: Naive = "weekly") -> float:
        """Return the mean absolute error of the one-step naive forecast in the owner's training part, in own units.

        MASE divides by it. NaN if the training part is not longer than one season.
        """
        begin, season = self.begins[owner], self.season(kind)
        past = self.values[begin : begin + self.trained_until[owner]].astype(np.float64)
        errors = np.abs(past[season:] - past[:-season])
        return float(np.nanmean(errors) * self.size[owner]) if np.isfinite(errors).any() else float("nan")

    def share_targets(self, samples: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Tell for each sample whether a value that it forecasts is also forecast by one of some other samples.

        Args:
            samples: indices of samples.
            others: indices of the other samples.
        """
        # Series lie one behind the other in `values`, so samples of two owners never have a target in common.
        begin, taken = self.target[samples], np.sort(self.target[others])
        after = np.searchsorted(taken, begin - self.horizon, side="right")
        first = np.append(taken, np.iinfo(taken.dtype).max)[after]
        return np.asarray(first < begin + self.horizon)

    def unscaled(self, scaled: np.ndarray, owner: int | np.ndarray) -> np.ndarray:
        """Return values in the data's own unit.

        Args:
            scaled: the values.
            owner: the owner of all of them, or an array with the owner of each row.
        """
        return np.asarray(scaled * self.size[owner] + self.shift[owner])

    def time(self, owner: int, place: int) -> datetime:
        """Return the time of a value, on the clock of its place.

        Args:
            owner: the owner.
            place: the index in `values`.
        """
        minutes = int(self.start[owner]) + int(place - self.begins[owner]) * self.step
        return _EPOCH + timedelta(minutes=int(local_minutes(np.array([minutes]), self.zone)[0]))
