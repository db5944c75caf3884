"""Settings of the samples that are made of time series: windows, lags, the calendar, scales and the split in time."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from equipoise.data.calendar_inputs import Calendar, CalendarStyle, calendar_width, holiday_numbers, read_holidays
from equipoise.errors import EquipoiseError
from equipoise.registry import find_path
from equipoise.settings import Count, Settings

Layout = Literal["flat", "sequence"]
Name = Annotated[str, Field(min_length=1)]


class WindowSettings(Settings):
    """Settings of all data sets of time series; the next `horizon` values are forecast from the last ones.

    What was added after experiments had run is None by default, so that their settings, and the digests of these, stay
    as they were.
    """

    window: Count = 24
    "number of values that the model reads"
    horizon: Count = 1
    "number of values that the model forecasts"
    stride: Count = 1
    "number of values from the start of one window to the next"
    scale: Literal["minmax", "standard", "none"] = "minmax"
    "scaling of each client's series, from its training part alone: to 0..1, or to mean 0 and standard deviation 1"
    lags: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    "further inputs from before the window, such as [168]: the values this many values before those that are forecast"
    calendar: Annotated[tuple[Calendar, ...], Field(min_length=1)] | None = None
    "inputs that describe the time of the first value that is forecast, on the clock of its place"
    calendar_as: CalendarStyle | None = None
    "the hour as 24 inputs of which one is 1 (one-hot, the default), or as sine and cosine of the time of day (waves)"
    holidays: Name | Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    'holidays of calendar = ["holiday"]: dates such as "2014-12-25", or the name of a file with one per line'
    layout: Layout | None = None
    "flat (the default): a row of all inputs; sequence: a row for each value of the window, for recurrent models"
    cut: Annotated[float, Field(gt=0, lt=1)] | None = None
    "fraction of the time at which the test part begins; the shares of training and validation are those of data.split"
    test_span: Count | None = None
    "number of values in the test part that begins at data.cut; what follows is not used; left out: all that follow"

    @model_validator(mode="after")
    def _lags_are_known_and_new(self) -> "WindowSettings":
        for lag in self.lags or ():
            if lag < self.horizon:
                raise EquipoiseError(
                    f"data.lags has {lag}, but data.horizon = {self.horizon}: the value {lag} before the last one that "
                    f"is forecast is not known yet; lags must be at least {self.horizon}"
                )
            if lag <= self.window:
                raise EquipoiseError(
                    f"data.lags has {lag}, which is among the {self.window} values that data.window gives already; "
                    f"lags must be greater than {self.window}"
                )
        _check_once("data.lags", self.lags or ())
        _check_once("data.calendar", self.calendar or ())
        return self

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "WindowSettings":
        if "holiday" in (self.calendar or ()) and self.holidays is None:
            raise EquipoiseError("data.calendar has 'holiday', so data.holidays must list the dates, or name a file")
        if self.holidays is not None and "holiday" not in (self.calendar or ()):
            raise EquipoiseError("data.holidays has no effect unless data.calendar has 'holiday'; add it there")
        if self.calendar_as is not None and "hour" not in (self.calendar or ()):
            raise EquipoiseError("data.calendar_as has no effect unless data.calendar has 'hour'; leave it out")
        if self.test_span is not None and self.cut is None:
            raise EquipoiseError("data.test_span needs data.cut, which says where the test part begins")
        if not isinstance(self.holidays, str):
            holiday_numbers(self.holidays or ())
        return self

    @property
    def sequence(self) -> bool:
        """Tell whether a sample is a row of inputs for each value of the window."""
        return self.layout == "sequence"

    @property
    def fills(self) -> int:
        """Return how many missing values in a row of the series are filled in inputs."""
        return 0

    @property
    def reach(self) -> int:
        """Return how many values before the first one that is forecast a sample needs."""
        lag = max(self.lags or (0,))
        return self.window - 1 + max(1, lag) if self.sequence else max(self.window, lag)

    @property
    def calendar_style(self) -> CalendarStyle:
        """Return how the hour is described."""
        return self.calendar_as or "one-hot"

    def width(self, exogenous: int) -> int:
        """Return the number of inputs of a sample, or in a sequence those of each value of the window.

        Args:
            exogenous: the number of exogenous series.
        """
        lags = len(self.lags or ())
        own = 1 + lags if self.sequence else self.window + lags * self.horizon
        return own + exogenous + calendar_width(self.calendar or (), self.calendar_style)

    def holiday_numbers(self, folders: Sequence[Path]) -> frozenset[int]:
        """Return the holidays as days since 1970.

        Args:
            folders: where the name of a file with holidays may begin.
        """
        if not isinstance(self.holidays, str):
            return holiday_numbers(self.holidays or ())
        if (path := find_path(self.holidays, folders)) is None:
            raise EquipoiseError(
                f"data.holidays = {self.holidays!r} is not a file; give a list of dates, or a file with one per line"
            )
        return holiday_numbers(read_holidays(path))


def _check_once(name: str, values: Sequence[object]) -> None:
    for one, next_one in pairwise(sorted(values, key=str)):
        if one == next_one:
            raise EquipoiseError(f"{name} has {one!r} twice; leave one of them out")
