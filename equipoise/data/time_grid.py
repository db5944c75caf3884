"""Values on a uniform grid of moments: the step between two, missing moments, short gaps, and averages."""

from dataclasses import dataclass, replace

import numpy as np

from equipoise.data.clocks import DAY, to_text
from equipoise.errors import EquipoiseError

_SPARSEST = 10  # moments of the grid for one row of the file, beyond which a date must be wrong
_FEW = 100_000  # moments that are always allowed


@dataclass(frozen=True)
class TimeGrid:
    """Columns with one value for each moment; NaN where the file has none."""

    start: int
    "minutes of the first moment since 1970, on a clock without daylight saving"
    step: int
    "minutes between two moments"
    columns: np.ndarray
    "the values, (moment, column)"
    rows: np.ndarray
    "row of the file that has each moment; 0 where none has"

    def __len__(self) -> int:
        return len(self.columns)

    def averaged(self, step: int, ahead: int) -> "TimeGrid":
        """Return means over longer steps; a mean with a missing value is missing, and incomplete steps at the ends go.

        Args:
            step: minutes of the longer step.
            ahead: minutes that the clock of the place is ahead of the grid's; steps begin at its full hours.
        """
        if step == self.step:
            return self
        each = step // self.step
        first = -(self.start + ahead) % step // self.step
        count = max(0, (len(self) - first) // each)
        columns = self.columns[first : first + count * each].reshape(count, each, -1).mean(1)
        rows = self.rows[first : first + count * each].reshape(count, each).max(1)
        return TimeGrid(self.start + first * self.step, step, columns, rows)

    def filled(self, longest: int) -> "TimeGrid":
        """Return the grid with gaps of at most this many values filled by straight lines."""
        columns = self.columns.copy()
        for k in range(columns.shape[1]):
            fill_gaps(columns[:, k], longest)
        return replace(self, columns=columns)


def fill_gaps(values: np.ndarray, longest: int) -> None:
    """Fill short gaps between two known values by straight lines, in place.

    Args:
        values: the values; NaN where one is missing.
        longest: the largest number of missing values in a row that are filled.
    """
    known = np.flatnonzero(~np.isnan(values))
    lengths = np.diff(known) - 1
    for left, length in zip(known[:-1][lengths > 0], lengths[lengths > 0], strict=True):
        if length <= longest:
            right = left + length + 1
            weight = np.arange(1, length + 1) / (length + 1)
            values[left + 1 : right] = values[left] * (1 - weight) + values[right] * weight


def on_grid(where: str, minutes: np.ndarray, columns: np.ndarray, rows: np.ndarray, shown: np.ndarray) -> TimeGrid:
    """Put the values of a file on a uniform grid.

    Args:
        where: the file, for error messages.
        minutes: the moment of each row on a clock without daylight saving.
        columns: the values, (row, column).
        rows: the number of each row in the file.
        shown: the moments as the file has them, for error messages.

    Returns:
        The grid, whose step is the most frequent difference between two rows.
    """
    if len(minutes) < 2:
        raise EquipoiseError(f"{where} has {len(minutes)} moments; a time series needs many")
    ahead = np.diff(minutes)
    for k in np.flatnonzero(ahead <= 0)[:1]:
        again = "the same time as" if ahead[k] == 0 else f"before the {to_text(shown[k])} of"
        raise EquipoiseError(
            f"{where}, row {rows[k + 1]}: {to_text(shown[k + 1])} is {again} row {rows[k]}; sort the rows by time, and "
            "keep one row for each moment"
        )
    found, counts = np.unique(ahead, return_counts=True)
    step = int(found[counts.argmax()])
    if DAY % step:
        raise EquipoiseError(
            f"{where} has a value every {step} minutes; the step must divide a day, such as 5, 15, 30 or 60 minutes"
        )
    for k in np.flatnonzero(ahead % step)[:1]:
        raise EquipoiseError(
            f"{where}, row {rows[k + 1]}: {to_text(shown[k + 1])} is {ahead[k]} minutes after the row before, but "
            f"values come every {step} minutes; correct the time, or average to full steps first"
        )
    places = (minutes - minutes[0]) // step
    length = int(places[-1]) + 1
    if length > _SPARSEST * len(minutes) + _FEW:
        k = int(ahead.argmax())
        raise EquipoiseError(
            f"{where}, row {rows[k + 1]}: {to_text(shown[k + 1])} is {ahead[k] // DAY} days after the row before; "
            "correct the date, or remove the rows on one side of the gap"
        )
    whole = np.full((length, columns.shape[1]), np.nan)
    whole[places] = columns
    numbers = np.zeros(length, np.int64)
    numbers[places] = rows
    return TimeGrid(int(minutes[0]), step, whole, numbers)
