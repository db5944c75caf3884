"""Inputs that describe a moment on the clock of its place: hour, weekday, month, weekend and holidays."""

from collections.abc import Collection, Sequence
from datetime import date
from pathlib import Path
from typing import Literal

import numpy as np

from equipoise.data.clocks import DAY
from equipoise.errors import EquipoiseError

Calendar = Literal["hour", "weekday", "weekend", "month", "holiday"]
CalendarStyle = Literal["one-hot", "waves"]
_THURSDAY = 3  # 1 January 1970; Monday is 0
_SATURDAY = 5


def calendar_inputs(
    minutes: np.ndarray, parts: Sequence[Calendar], style: CalendarStyle, holidays: Collection[int]
) -> np.ndarray:
    """Return the inputs of moments, one row each: for every part of the calendar its columns, in this order.

    Args:
        minutes: minutes since 1970 on the clock of the place.
        parts: which inputs there are.
        style: the hour as 24 columns of which one is 1, or as the sine and cosine of the time of day.
        holidays: days since 1970.
    """
    days = minutes // DAY
    weekday = (days + _THURSDAY) % 7
    columns: list[np.ndarray] = [np.empty((len(minutes), 0))]
    for part in parts:
        if part == "hour" and style == "waves":
            angle = 2 * np.pi * (minutes % DAY) / DAY
            columns.append(np.stack([np.sin(angle), np.cos(angle)], axis=1))
        elif part == "hour":
            columns.append(_one_hot(minutes % DAY // 60, 24))
        elif part == "weekday":
            columns.append(_one_hot(weekday, 7))
        elif part == "month":
            months = days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
            columns.append(_one_hot(months % 12, 12))
        elif part == "weekend":
            columns.append((weekday >= _SATURDAY)[:, None])
        else:
            columns.append(np.isin(days, list(holidays))[:, None])
    return np.concatenate(columns, axis=1, dtype=np.float32, casting="unsafe")


def calendar_width(parts: Sequence[Calendar], style: CalendarStyle) -> int:
    """Return the number of columns of `calendar_inputs`."""
    return int(calendar_inputs(np.zeros(0, np.int64), parts, style, ()).shape[1])


def _one_hot(values: np.ndarray, count: int) -> np.ndarray:
    return np.asarray(np.eye(count, dtype=np.float32)[values])


def read_holidays(path: Path) -> tuple[str, ...]:
    """Return the dates of a file with one per line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EquipoiseError(f"{path} (data.holidays) cannot be read as text in UTF-8: {error}") from None
    return tuple(line.strip() for line in lines if line.strip())


def holiday_numbers(dates: Sequence[str]) -> frozenset[int]:
    """Return dates such as 2014-12-25 as days since 1970."""
    found = set()
    for text in dates:
        try:
            found.add((date.fromisoformat(text) - date(1970, 1, 1)).days)
        except ValueError:
            raise EquipoiseError(
                f"data.holidays has {text[:40]!r}, which is not a date; write dates as 2014-12-25"
            ) from None
    return frozenset(found)
