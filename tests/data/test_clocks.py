"""Clocks with daylight saving, and the calendar on them."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.data.calendar_inputs import calendar_inputs
from equipoise.data.clocks import Zone, check_zone, local_minutes, read_minutes
from equipoise.errors import EquipoiseError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ZONES = ("Europe/Lisbon", "America/St_Johns", "Australia/Lord_Howe", "Asia/Kolkata", "Africa/Casablanca", "UTC")


def minutes(moment: datetime) -> int:
    return int((moment - EPOCH).total_seconds()) // 60


@given(st.sampled_from(ZONES), st.integers(0, 40 * 365), st.sampled_from([5, 15, 30, 60]))
def test_local_times_are_those_of_the_standard_library(zone: str, day: int, step: int) -> None:
    utc = np.arange(day * 24 * 60, (day + 30) * 24 * 60, step)
    expected = []
    for minute in utc[::7]:
        local = (EPOCH + timedelta(minutes=int(minute))).astimezone(ZoneInfo(zone))
        expected.append(minutes(local.replace(tzinfo=UTC)))
    assert local_minutes(utc, zone)[::7].tolist() == expected


@given(st.sampled_from(ZONES), st.integers(0, 40 * 365), st.sampled_from([15, 30]))
def test_a_clock_that_is_written_down_without_gaps_gives_the_time_back(zone: str, day: int, step: int) -> None:
    """Also through the hour that is repeated: the second time it is written, it is the second one."""
    utc = np.arange(day * 24 * 60, (day + 60) * 24 * 60, step)
    found, skipped = Zone.covering(zone, int(utc[0]), int(utc[-1])).utc(local_minutes(utc, zone))
    assert np.array_equal(found, utc)
    assert not skipped.any()


def test_the_skipped_hour_and_the_repeated_one() -> None:
    zone = Zone.covering(
        "Europe/Lisbon", minutes(datetime(2014, 3, 1, tzinfo=UTC)), minutes(datetime(2014, 11, 1, tzinfo=UTC))
    )
    spring = np.array([minutes(datetime(2014, 3, 30, hour, tzinfo=UTC)) for hour in (0, 1, 2)])
    utc, skipped = zone.utc(spring)
    assert skipped.tolist() == [False, True, False]
    assert utc[2] - utc[0] == 60
    autumn = [minutes(datetime(2014, 10, 26, hour, tzinfo=UTC)) for hour in (0, 1, 1, 2)]
    utc, _ = zone.utc(np.array(autumn))
    assert np.diff(utc).tolist() == [60, 60, 60]
    once, _ = zone.utc(np.array([autumn[0], autumn[1], autumn[3]]))
    assert np.diff(once).tolist() == [60, 120]  # there once, it is the first; the second is missing


@given(st.integers(0, 60 * 365 * 24), st.sampled_from([1, 5, 60]))
def test_the_calendar_is_the_standard_librarys(hour: int, step: int) -> None:
    moments = hour * 60 + step * np.arange(50)
    parts = ("hour", "weekday", "month", "weekend", "holiday")
    rows = calendar_inputs(moments, parts, "one-hot", {int(moments[-1]) // 1440})
    assert rows.shape == (50, 24 + 7 + 12 + 2)
    for row, minute in zip(rows, moments, strict=True):
        when = EPOCH + timedelta(minutes=int(minute))
        assert np.flatnonzero(row[:43]).tolist() == [when.hour, 24 + when.weekday(), 31 + when.month - 1]
        last = EPOCH + timedelta(minutes=int(moments[-1]))
        assert row[43:].tolist() == [when.weekday() >= 5, when.date() == last.date()]


def test_waves_join_midnight_and_have_length_one() -> None:
    waves = calendar_inputs(np.array([0, 6 * 60, 1439, 1440]), ("hour",), "waves", ())
    np.testing.assert_allclose(waves[0], [0, 1], atol=1e-6)
    np.testing.assert_allclose(waves[1], [1, 0], atol=1e-6)
    assert np.abs(waves[2] - waves[3]).max() < 0.01
    np.testing.assert_allclose((waves**2).sum(1), 1, atol=1e-6)


def test_offsets_are_read_and_seconds_refused() -> None:
    assert read_minutes("1970-01-01T01:00:00+01:00", "x") == (60, 60)
    assert read_minutes("02.01.1970 00:05", "x", "%d.%m.%Y %H:%M") == (1445, None)
    with pytest.raises(EquipoiseError, match=r"x: '1970-01-01 00:00:30' is not a date and time in whole minutes"):
        read_minutes("1970-01-01 00:00:30", "x")


@pytest.mark.parametrize(
    ("name", "hint"), [("Europe/Lisbonn", "did you mean 'Europe/Lisbon'"), ("Europe", "did you mean"), ("", "such as")]
)
def test_a_zone_that_does_not_exist(name: str, hint: str) -> None:
    with pytest.raises(EquipoiseError, match=f"is not a time zone; .*{hint}"):
        check_zone(name)
