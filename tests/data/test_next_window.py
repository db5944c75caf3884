"""The input of a forecast beyond the data is made as those of samples are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.data.next_window import input_at
from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from tests.support import datafiles
from tests.support.datafiles import load

ALL = (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 5, "horizon": 3, "scale": "standard"},
        {"window": 6, "lags": [24, 30], "calendar": ["hour", "weekday"]},
        {"window": 6, "lags": [24], "calendar": ["hour", "holiday"], "holidays": ["2016-07-04"], "layout": "sequence"},
    ],
)
def test_at_the_place_of_a_sample_it_is_its_input(settings: dict[str, Any], tmp_path: Path) -> None:
    datafiles.electricity(tmp_path / "electricity.csv.gz", clients=2)
    pool = load("electricity", tmp_path, split=ALL, **settings)
    facts, source = pool.series, SOURCES["electricity"](**settings)
    assert facts is not None
    for sample in (0, len(pool) // 2, len(pool) - 1):
        found = input_at(source, facts, int(facts.owner[sample]), int(facts.target[sample]))
        assert np.array_equal(found, pool.x[sample].numpy())


def test_after_the_end_it_is_the_last_values_and_the_following_hour(tmp_path: Path) -> None:
    datafiles.electricity(tmp_path / "electricity.csv.gz", clients=1)
    settings = {"window": 4, "calendar": ["hour"]}
    facts = load("electricity", tmp_path, split=ALL, **settings).series
    assert facts is not None
    found = input_at(SOURCES["electricity"](**settings), facts, 0, len(facts.values))
    assert np.array_equal(found[:4], facts.values[-4:])
    assert found[4:].argmax() == facts.time(0, len(facts.values)).hour


def test_what_cannot_be_known_is_refused(tmp_path: Path) -> None:
    datafiles.electricity(tmp_path / "electricity.csv.gz", clients=1)
    facts = load("electricity", tmp_path, split=ALL).series
    assert facts is not None
    with pytest.raises(EquipoiseError, match="only 23 values of 'OT' are known, and the model reads the last 24"):
        input_at(SOURCES["electricity"](), facts, 0, 23)
    with pytest.raises(EquipoiseError, match=r"needs temperature \(data.exogenous\) after their end"):
        input_at(SOURCES["loads"](exogenous=["temperature"]), facts, 0, 100)


def test_only_values_that_are_read_must_be_known_and_gaps_are_filled_as_in_training(tmp_path: Path) -> None:
    values = [f"{(7 * k) % 11 + k % 24}" for k in range(80)]
    values[30], values[70] = "", ""
    rows = [f"2014-06-{2 + k // 24:02d} {k % 24:02d}:00,{value}" for k, value in enumerate(values)]
    (tmp_path / "a.csv").write_text("time,load\n" + "\n".join(rows) + "\n")
    settings = {"path": str(tmp_path / "a.csv"), "window": 4, "lags": [24], "calendar": ["hour"]}
    for gaps in ("skip", "interpolate"):
        pool = load("loads", tmp_path, split=ALL, gaps=gaps, **settings)
        facts, source = pool.series, SOURCES["loads"](gaps=gaps, **settings)
        assert facts is not None
        asked = set(facts.target.tolist())
        # 73 reads the gap at 70 in its window, 54 reads that at 30 as its lag, and 60 reads neither.
        assert asked >= {60}
        assert asked.isdisjoint({71, 31})
        assert (asked >= {73, 54}) == (gaps == "interpolate")
        for place in asked:
            found = input_at(source, facts, 0, place)
            assert np.array_equal(found, pool.x[facts.target == place][0].numpy())
        if gaps == "skip":
            with pytest.raises(EquipoiseError, match="the model has no input for 'load'"):
                input_at(source, facts, 0, 73)
        with pytest.raises(EquipoiseError, match="the last value of 'load' is missing"):
            input_at(source, facts, 0, 71)
