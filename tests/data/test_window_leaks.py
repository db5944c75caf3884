"""No sample knows the future: inputs are known before the forecast, and scales come from the training part."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data.owner_windows import OwnerSeries
from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest
from equipoise.data.time_grid import TimeGrid
from equipoise.data.window_samples import SeriesSet, pool_of_series
from equipoise.data.windows import WindowSettings

LENGTH = 120
SPLIT = (0.6, 0.2, 0.2)
MISSING = st.lists(st.integers(0, LENGTH - 1), max_size=25)
SAMPLES = {
    "window": st.integers(1, 6),
    "horizon": st.integers(1, 4),
    "lags": st.sampled_from([None, (7,), (9, 24)]),
    "calendar": st.sampled_from([None, ("hour",), ("weekday", "weekend")]),
    "layout": st.sampled_from([None, "sequence"]),
    "scale": st.sampled_from(["minmax", "standard", "none"]),
    "cut": st.sampled_from([None, 0.7]),
    "stride": st.integers(1, 3),
}


def pool_of(load: np.ndarray, weather: np.ndarray, options: dict[str, Any], known: bool = False) -> Pool:
    """One client's samples, with gaps of at most three values filled in."""
    columns = np.stack([load, weather], axis=1)
    filled = TimeGrid(0, 60, columns, np.zeros(LENGTH, np.int64)).filled(3).columns
    own = OwnerSeries(load, 0, 0, LENGTH, filled[:, 0], weather[:, None], filled[:, 1:])
    data = SeriesSet({"a": own}, 60, exogenous=1, known_ahead=known)
    return pool_of_series(WindowSettings(**options), data, LoadRequest(Path(), split=SPLIT))


def with_gaps(seed: int, missing: list[int]) -> np.ndarray:
    values = np.random.default_rng(seed).random(LENGTH)
    values[missing] = np.nan
    return values


@settings(max_examples=150)
@given(st.fixed_dictionaries(SAMPLES), st.integers(0, 99), MISSING, MISSING, st.integers(30, LENGTH - 1))
def test_inputs_do_not_change_with_values_from_the_first_target_on(
    options: dict[str, Any], seed: int, gaps: list[int], outside: list[int], now: int
) -> None:
    """`now` is in the test part, so that scales are the same; every value from then on is another one."""
    load, weather = with_gaps(seed, gaps), with_gaps(seed + 1, outside)
    one = pool_of(load, weather, options)
    if not len(one) or one.series.trained_until[0] > now:  # type: ignore[union-attr]
        return
    future = np.arange(LENGTH) >= now
    other = pool_of(np.where(future, load * 3 + 1, load), np.where(future, weather * 3 + 1, weather), options)
    assert one.series is not None
    assert other.series is not None
    assert np.array_equal(one.series.target, other.series.target)
    assert (one.series.shift, one.series.size) == (other.series.shift, other.series.size)
    before = one.series.target <= now
    assert np.array_equal(one.x[before], other.x[before])
    ended = one.series.target + one.series.horizon <= now
    assert np.array_equal(one.y[ended], other.y[ended])


@settings(max_examples=100)
@given(st.fixed_dictionaries(SAMPLES), st.integers(0, 99), MISSING, st.booleans())
def test_samples_have_all_values_and_targets_were_measured(
    options: dict[str, Any], seed: int, gaps: list[int], known: bool
) -> None:
    load, weather = with_gaps(seed, gaps), with_gaps(seed + 1, gaps[::2])
    pool = pool_of(load, weather, options, known)
    assert bool(pool.x.isfinite().all())
    facts, scale = pool.series, options["scale"]
    assert facts is not None
    if not len(pool):
        return
    past = load[: facts.trained_until[0]]
    past = past[~np.isnan(past)]
    if scale != "none":
        low, size = (past.min(), np.ptp(past)) if scale == "minmax" else (past.mean(), past.std())
        np.testing.assert_allclose([facts.shift[0], facts.size[0]], [low, size])
    places = facts.target[:, None] + np.arange(facts.horizon)
    np.testing.assert_allclose(facts.unscaled(pool.y.numpy(), 0), load[places], rtol=1e-5, atol=1e-6)
    assert not np.isnan(load[facts.target - 1]).any()


@settings(max_examples=60)
@given(st.fixed_dictionaries(SAMPLES), st.integers(0, 99), MISSING)
def test_every_sample_without_a_gap_is_there(options: dict[str, Any], seed: int, gaps: list[int]) -> None:
    """Without filling, the samples are those of the complete series that touch no gap."""
    load = np.random.default_rng(seed).random(LENGTH)
    whole = LoadRequest(Path(), split=SPLIT)
    choice = WindowSettings(**options | {"scale": "none"})

    def pool(values: np.ndarray) -> Pool:
        return pool_of_series(choice, SeriesSet({"a": OwnerSeries(values, 0, 0, LENGTH)}, 60), whole)

    full = pool(load)
    holes = load.copy()
    holes[gaps] = np.nan
    found = pool(holes)
    assert full.series is not None
    assert found.series is not None
    lags = [np.arange(-lag, choice.horizon - lag) for lag in choice.lags or ()]
    if choice.sequence:
        lags = [np.arange(1 - choice.window - lag, 1 - lag) for lag in choice.lags or ()]
    touched = np.concatenate([np.arange(-choice.window, choice.horizon), *lags])
    free = ~np.isnan(holes[full.series.target[:, None] + touched]).any(1)
    if (full.part[free] == 0).any():  # type: ignore[index]
        assert np.array_equal(found.series.target, full.series.target[free])
        assert np.array_equal(found.x, full.x[free])
    else:
        assert not len(found)
