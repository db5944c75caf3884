"""The times of a table as minutes on a clock without daylight saving, and the time zone of its place."""

from dataclasses import dataclass

import numpy as np

from equipoise.data.clocks import Zone, read_minutes, to_text
from equipoise.data.series_files import SeriesTable
from equipoise.errors import EquipoiseError

_HINT = ", such as 2014-03-30 01:00; for another notation set data.time_format, such as '%d.%m.%Y %H:%M'"


@dataclass(frozen=True)
class Moments:
    """The moments of a table's rows."""

    minutes: np.ndarray
    "minutes since 1970: in UTC if there is a time zone, else on the clock of the place, which has no daylight saving"
    written: np.ndarray
    "minutes since 1970 as the file has them, for messages"
    kept: np.ndarray
    "whether each row of the table is one of these moments; the others are in hours that do not exist"
    zone: str = ""


def read_moments(where: str, table: SeriesTable, timezone: str | None, form: str | None) -> Moments:
    """Return the moments of a table.

    Times with offsets are exact. Times without are those of the clock of the time zone: an hour that is skipped must be
    empty or zero, and an hour that is repeated may be there once or twice. Without offsets and time zone, the clock is
    taken as one without daylight saving.

    Args:
        where: the file, for error messages.
        table: its rows.
        timezone: the time zone of the place, if it is given.
        form: the notation of times, as Python's strptime has it; None: ISO 8601.
    """
    hint = "" if form is None else f" in the notation data.time_format = {form!r}"
    read = [
        read_minutes(cell, f"{where}, row {row}", form, hint or _HINT)
        for cell, row in zip(table.times, table.rows, strict=True)
    ]
    written = np.array([minutes for minutes, _ in read], np.int64)
    offsets = [offset for _, offset in read]
    kept = np.ones(len(written), bool)
    if all(offset is None for offset in offsets):
        if timezone is None or not len(written):
            return Moments(written, written, kept)
        zone = Zone.covering(timezone, int(written.min()), int(written.max()))
        minutes, skipped = zone.utc(written)
        _check_skipped(where, table, written, skipped, timezone)
        return Moments(minutes[~skipped], written[~skipped], ~skipped, timezone)
    shifts = np.array([offset or 0 for offset in offsets], np.int64)
    for k, offset in enumerate(offsets):
        if (offset is None) != (offsets[0] is None):
            raise EquipoiseError(
                f"{where}, row {table.rows[k]}: {table.times[k]} has {'no' if offset is None else 'an'} offset from "
                "UTC, unlike the first row; write all times in the same way"
            )
        if timezone is None and offset != offsets[0]:
            raise EquipoiseError(
                f"{where}, row {table.rows[k]}: {table.times[k]} has another offset from UTC than the first row, so "
                "the clock of the place has daylight saving; name its time zone, as in data.timezone = 'Europe/Lisbon'"
            )
    if timezone is None:
        return Moments(written, written, kept)
    return Moments(written - shifts, written, kept, timezone)


def _check_skipped(where: str, table: SeriesTable, written: np.ndarray, skipped: np.ndarray, timezone: str) -> None:
    """Raise an error if there is a load in an hour that does not exist."""
    loads = skipped & (np.nan_to_num(table.values) != 0).any(1)
    for k in np.flatnonzero(loads)[:1]:
        raise EquipoiseError(
            f"{where}, row {table.rows[k]}: {to_text(written[k])} does not exist in data.timezone = {timezone!r}, "
            "where clocks are put forward; if the clock of the file has no daylight saving, leave data.timezone out"
        )
