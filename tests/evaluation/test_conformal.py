"""Conformal intervals: coverage of exchangeable data, ranks, and what intervals contain."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from equipoise.errors import EquipoiseError
from equipoise.evaluation.conformal import Forecasts, check_level, conformal_margin, fewest_samples, rank


def test_ranks_are_those_of_the_definition() -> None:
    assert [rank(n, 0.9) for n in (1, 8, 9, 19, 99)] == [2, 9, 9, 18, 90]
    assert rank(9, 0.9) == 9  # 10 * 0.9 in binary numbers could be a little more than 9
    assert [fewest_samples(level) for level in (0.5, 0.8, 0.9, 0.95, 0.99)] == [1, 4, 9, 19, 99]


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("quantiles", [False, True])
def test_exchangeable_data_reach_the_nominal_coverage(level: float, quantiles: bool) -> None:
    rng, trials, n = np.random.default_rng(7), 2000, 40
    inside = 0
    for _ in range(trials):
        y = rng.exponential(size=(n + 1, 1))
        point = np.full_like(y, 0.3)  # a bad forecast: coverage does not depend on the model
        low, high = (np.full_like(y, 0.2), np.full_like(y, 0.9)) if quantiles else (point, point)
        known = Forecasts(point[:n], low[:n], high[:n])
        found = Forecasts(point[n:], low[n:], high[n:]).widened(conformal_margin(known, y[:n], level))
        inside += int(found.lower[0, 0] <= y[n, 0] <= found.upper[0, 0])
    # Each trial succeeds with a probability from level to level + 1 / (n + 1), more where intervals keep their point.
    assert inside >= binom.ppf(1e-6, trials, level)
    if not quantiles:
        assert inside <= binom.ppf(1 - 1e-6, trials, level + 1 / (n + 1))


def test_margins_are_order_statistics_of_each_step() -> None:
    rng = np.random.default_rng(0)
    point, y = rng.normal(size=(25, 3)), rng.normal(size=(25, 3))
    margin = conformal_margin(Forecasts(point, point, point), y, 0.8)
    assert np.array_equal(margin, np.sort(np.abs(y - point), axis=0)[21 - 1])  # ceil(26 * 0.8) = 21


def test_intervals_are_infinite_with_too_few_samples() -> None:
    point = np.zeros((8, 2))
    assert np.isinf(conformal_margin(Forecasts(point, point, point), point, 0.9)).all()
    empty = np.zeros((0, 2))
    assert np.isinf(conformal_margin(Forecasts(empty, empty, empty), empty, 0.5)).all()


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.95))
def test_intervals_contain_the_point_forecast(seed: int, level: float) -> None:
    rng = np.random.default_rng(seed)
    quantiles, y = np.sort(rng.normal(size=(30, 2, 3)), axis=-1), 0.1 * rng.normal(size=(30, 2))
    known = Forecasts(quantiles[..., 1], quantiles[..., 0], quantiles[..., 2])
    found = known.widened(conformal_margin(known, y, round(level, 3)))
    assert (found.lower <= found.point).all()
    assert (found.point <= found.upper).all()


@pytest.mark.parametrize("level", [0, 1, 1.5, -0.1, True, "0.9"])
def test_levels_are_probabilities(level: float) -> None:
    with pytest.raises(EquipoiseError, match="a probability between 0 and 1"):
        check_level(level)
