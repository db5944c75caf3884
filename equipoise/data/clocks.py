"""Clocks of load tables: dates and times as minutes, time zones, and hours that are skipped or repeated."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

import numpy as np

from equipoise.errors import EquipoiseError

DAY = 24 * 60
"""Minutes of a day."""
_EPOCH = datetime(1970, 1, 1)
_MINUTE = timedelta(minutes=1)


def read_minutes(cell: str | datetime, where: str, form: str | None = None, hint: str = "") -> tuple[int, int | None]:
    """Return a date and time as minutes since 1970, as written, and the minutes that it is ahead of UTC, if it says so.

    Args:
        cell: the date and time.
        where: the place of the cell, for error messages.
        form: the notation, as Python's strptime has it; None: ISO 8601, such as 2014-03-30 01:00.
        hint: the end of the error message.
    """
    try:
        moment = cell
        if isinstance(moment, str):
            moment = datetime.strptime(moment, form) if form else datetime.fromisoformat(moment)
        minutes, rest = divmod(moment.replace(tzinfo=None) - _EPOCH, _MINUTE)
        offset = moment.utcoffset()
        if not rest:
            return minutes, None if offset is None else offset // _MINUTE
    except ValueError:
        pass
    raise EquipoiseError(f"{where}: {str(cell)[:40]!r} is not a date and time in whole minutes{hint}")


def to_text(minutes: int) -> str:
    """Return minutes since 1970 as a date and a time, for messages."""
    return f"{_EPOCH + timedelta(minutes=int(minutes)):%Y-%m-%d %H:%M}"


@dataclass(frozen=True)
class Zone:
    """A time zone in a span of time, as the moments at which its offset from UTC changes."""

    name: str
    changes: np.ndarray
    "minutes since 1970 in UTC"
    offsets: np.ndarray
    "minutes ahead of UTC: before the first change, after it, and so on"

    @staticmethod
    def covering(name: str, first: int, last: int) -> "Zone":
        """Return the time zone of this name.

        Args:
            name: the name, such as Europe/Lisbon.
            first: the first minute that is asked for, on any clock.
            last: the last one.
        """
        return _zone(name, first // DAY - 2, last // DAY + 3)

    def local(self, utc: np.ndarray) -> np.ndarray:
        """Return minutes on the local clock at these minutes in UTC."""
        return np.asarray(utc + self.offsets[np.searchsorted(self.changes, utc, "right")])

    def utc(self, local: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the minutes in UTC of a clock that was read again and again, and which of them do not exist.

        A time that the clock shows twice, because it was put back, is the first one unless that has passed already.

        Args:
            local: minutes on the local clock, in the order in which they were written down.
        """
        before, after = self.offsets[:-1], self.offsets[1:]
        # A clock that is put back repeats the times between these two; one that is put forward skips them.
        passed = np.searchsorted(self.changes + np.maximum(before, after), local, "right")
        reached = np.searchsorted(self.changes + np.minimum(before, after), local, "right")
        utc, skipped = local - self.offsets[passed], np.zeros(len(local), bool)
        for i in np.flatnonzero(passed != reached):
            change = passed[i]
            if before[change] < after[change]:
                skipped[i] = True
            elif i and utc[i] <= utc[i - 1]:
                utc[i] = local[i] - after[change]
        return utc, skipped


def local_minutes(minutes: np.ndarray, zone: str) -> np.ndarray:
    """Return what the clock shows at these minutes: of UTC if there is a zone, else of the clock itself."""
    if not zone or not len(minutes):
        return minutes
    return Zone.covering(zone, int(minutes[0]), int(minutes[-1])).local(minutes)


def check_zone(name: str) -> None:
    """Raise an error unless this is the name of a time zone."""
    _found(name)


def _found(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError):  # OSError: the name of a folder of zones, such as Europe
        known = available_timezones()
    if not known:
        raise EquipoiseError("this machine has no list of time zones; install one with: pip install tzdata")
    close = get_close_matches(name[:100], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "it must be a name such as 'Europe/Lisbon'"
    raise EquipoiseError(f"data.timezone = {name[:100]!r} is not a time zone; {hint}")


@lru_cache(maxsize=256)
def _zone(name: str, first_day: int, last_day: int) -> Zone:
    zone = _found(name)

    def offset(minute: int) -> int:
        shift = (_EPOCH + timedelta(minutes=minute)).replace(tzinfo=UTC).astimezone(zone).utcoffset()
        assert shift is not None
        return shift // _MINUTE

    changes, offsets = [], [offset(first_day * DAY)]
    for day in range(first_day, last_day):
        low, high = day * DAY, (day + 1) * DAY
        if offset(high) == offsets[-1]:
            continue
        while high - low > 1:  # offset(low) is the one before the change, offset(high) the one after
            middle = (low + high) // 2
            low, high = (middle, high) if offset(middle) == offsets[-1] else (low, middle)
        changes.append(high)
        offsets.append(offset(high))
    return Zone(name, np.array(changes, np.int64), np.array(offsets, np.int64))
