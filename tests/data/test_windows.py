"""Samples of time series: what a window, a lag, the calendar and a sequence are, and settings that are not possible."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.data.config import DataSection
from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from tests.support import datafiles
from tests.support.datafiles import load

ALL = (1.0, 0.0, 0.0)


def scaled_series(folder: Path, **settings: Any) -> tuple[np.ndarray, Any]:
    """The first client's series, scaled by hand, and the pool with everything in the training part."""
    series = datafiles.electricity(folder / "electricity.csv.gz", clients=2)[:, 0]
    pool = load("electricity", folder, split=ALL, **settings)
    low, high = series.min(), series.max()
    return (series - low) / (high - low), pool


def test_a_row_has_the_window_the_lags_and_the_calendar(tmp_path: Path) -> None:
    scaled, pool = scaled_series(tmp_path, window=6, horizon=3, lags=[24, 48], calendar=["weekend", "hour"])
    own = pool.x[pool.owner == 0].numpy()
    assert own.shape == (200 - 48 - 3 + 1, 6 + 2 * 3 + 1 + 24)
    for k, t in enumerate(range(48, 198)):
        past = [scaled[t - 6 : t], scaled[t - 24 : t - 21], scaled[t - 48 : t - 45]]
        weekend = [t // 24 in (1, 2, 8)]  # 1 July 2016 was a Friday
        hour = np.eye(24)[t % 24]
        np.testing.assert_allclose(own[k], np.concatenate([*past, weekend, hour]), atol=1e-6)
        np.testing.assert_allclose(pool.y[k], scaled[t : t + 3], atol=1e-6)


def test_the_last_row_of_a_sequence_knows_what_a_flat_row_knows(tmp_path: Path) -> None:
    settings = {"window": 6, "lags": [24, 30], "calendar": ["hour", "month"], "calendar_as": "waves"}
    _, sequences = scaled_series(tmp_path, layout="sequence", **settings)
    flat = load("electricity", tmp_path, split=ALL, **settings)
    assert sequences.x.shape[1:] == (6, 1 + 2 + 2 + 12)
    assert flat.x.shape[1] == 6 + 2 + 2 + 12
    rows = flat.x[np.isin(flat.series.target, sequences.series.target)]
    assert np.array_equal(sequences.x[:, :, 0], rows[:, :6])
    assert np.array_equal(sequences.x[:, -1, 1:], rows[:, 6:])
    for step in range(6):  # rows of the window move through time together
        assert np.array_equal(sequences.x[6:70, step, 1:], sequences.x[6 - 5 + step : 70 - 5 + step, -1, 1:])


def test_facts_lead_back_to_the_data(tmp_path: Path) -> None:
    series = datafiles.electricity(tmp_path / "electricity.csv.gz", clients=2)
    pool = load("electricity", tmp_path, split=(0.6, 0.2, 0.2), horizon=2, scale="standard")
    facts = pool.series
    assert facts is not None
    assert (facts.names, facts.step, facts.horizon, facts.unit) == (("0", "OT"), 60, 2, "kW")
    for k in range(2):
        own = slice(facts.begins[k], facts.begins[k + 1])
        np.testing.assert_allclose(facts.unscaled(facts.values[own], k), series[:, k], atol=1e-3)
        past = series[: facts.trained_until[k], k]
        np.testing.assert_allclose([facts.shift[k], facts.size[k]], [past.mean(), past.std()])
    assert np.array_equal(facts.owner, pool.owner)  # type: ignore[arg-type]
    assert np.array_equal(facts.values[facts.target[:, None] + [0, 1]], pool.y)
    assert str(facts.time(1, facts.begins[1] + 25)) == "2016-07-02 01:00:00"
    last_training = facts.target[(pool.owner == 1) & (pool.part == 0)].max()
    assert facts.trained_until[1] == last_training + 2 - facts.begins[1]


def test_unscaled_values_stay_as_they_are(tmp_path: Path) -> None:
    series = datafiles.electricity(tmp_path / "electricity.csv.gz", clients=2)
    pool = load("electricity", tmp_path, scale="none", window=1)
    assert np.array_equal(pool.x[pool.owner == 1, 0], series[:199, 1][: (pool.owner == 1).sum()])


def test_holidays_are_a_list_or_a_file(tmp_path: Path) -> None:
    datafiles.electricity(tmp_path / "electricity.csv.gz")
    (tmp_path / "days.txt").write_text("2016-07-04\n\n2016-07-05\n")
    settings = {"window": 1, "calendar": ["holiday"], "split": ALL}
    one = load("electricity", tmp_path, holidays=["2016-07-04", "2016-07-05"], **settings)
    two = load("electricity", tmp_path, holidays="days.txt", **settings)
    assert np.array_equal(one.x, two.x)
    days = [one.series.time(0, place).day for place in one.series.target[one.owner == 0]]  # type: ignore[union-attr]
    assert one.x[one.owner == 0, 1].tolist() == [float(day in (4, 5)) for day in days]


def test_new_settings_leave_those_of_older_experiments_as_they_were() -> None:
    """A sweep finds its runs by a digest of the table, which older versions wrote without these settings."""
    assert list(SOURCES["electricity"]().table()) == ["window", "horizon", "stride", "scale", "hourly"]
    assert "unseen_history" not in DataSection.parse({"name": "electricity"}).table()
    given = {"lags": [168], "calendar": ["hour"], "cut": 0.5, "layout": "sequence"}
    assert json.loads(json.dumps(SOURCES["electricity"](**given).table())).items() >= given.items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lags": [30], "horizon": 48}, r"data.lags has 30, but data.horizon = 48: the value .* not known yet"),
        ({"lags": [24]}, "data.lags has 24, which is among the 24 values that data.window gives already"),
        ({"lags": [168, 48, 168]}, "data.lags has 168 twice"),
        ({"calendar": ["hour", "hour"]}, "data.calendar has 'hour' twice"),
        ({"calendar": ["minute"]}, "data.calendar = .*'minute'.* is not allowed"),
        ({"calendar": ["holiday"]}, "data.holidays must list the dates, or name a file"),
        ({"holidays": ["2014-12-25"]}, "has no effect unless data.calendar has 'holiday'"),
        ({"calendar": ["holiday"], "holidays": ["25.12.2014"]}, "'25.12.2014', which is not a date"),
        ({"calendar": ["month"], "calendar_as": "waves"}, "data.calendar_as has no effect"),
        ({"test_span": 24}, "data.test_span needs data.cut"),
        ({"cut": 1.0}, "data.cut = 1.0 is not allowed"),
    ],
)
def test_settings_that_are_not_possible(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EquipoiseError, match=message):
        DataSection.parse({"name": "electricity", **settings})


def test_a_file_of_holidays_that_is_not_there(tmp_path: Path) -> None:
    datafiles.electricity(tmp_path / "electricity.csv.gz")
    with pytest.raises(EquipoiseError, match=r"data.holidays = 'days.txt' is not a file"):
        load("electricity", tmp_path, calendar=["holiday"], holidays="days.txt")
    (tmp_path / "days.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(EquipoiseError, match="cannot be read as text"):
        load("electricity", tmp_path, calendar=["holiday"], holidays="days.txt")
