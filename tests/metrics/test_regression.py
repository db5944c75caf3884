"""Metrics of numbers beside their formulas."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.metrics import METRICS


def numbers(n: int, columns: int, seed: int, unit: float = 1.0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    target = unit * rng.normal(size=(n, columns))
    return torch.from_numpy(target + 0.5 * unit * rng.normal(size=(n, columns))), torch.from_numpy(target)


@given(st.integers(2, 30), st.integers(1, 3), st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 1.0, 1e6]))
def test_r2_in_any_unit(n: int, columns: int, seed: int, unit: float) -> None:
    output, target = numbers(n, columns, seed, unit)
    o, t = output.numpy(), target.numpy()
    expected = np.mean(1 - ((o - t) ** 2).sum(0) / ((t - t.mean(0)) ** 2).sum(0))
    assert METRICS["r2"].score(output, target) == pytest.approx(expected, rel=1e-6)


def test_r2_is_undefined_where_targets_do_not_vary() -> None:
    output, target = numbers(5, 2, 0)
    assert np.isnan(METRICS["r2"].score(output[:1], target[:1]))
    constant = target.clone()
    constant[:, 0] = 3.0
    assert METRICS["r2"].score(output, constant) == METRICS["r2"].score(output[:, 1:], target[:, 1:])
    assert np.isnan(METRICS["r2"].score(output, torch.full_like(target, 3.0)))


def test_r2_of_a_near_fit_is_not_one() -> None:
    target = torch.linspace(0, 1, 50, dtype=torch.float64)
    assert METRICS["r2"].score(target[:, None] + 1e-5, target) == pytest.approx(1 - 1e-10 / target.var(correction=0))
    assert METRICS["r2"].score(target[:, None] + 1e-5, target) < 1


@given(st.integers(1, 30), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_errors_are_those_of_torchmetrics(n: int, columns: int, seed: int) -> None:
    output, target = numbers(n, columns, seed)
    flat = output.flatten(), target.flatten()
    import torchmetrics.functional.regression as tm  # takes a second, which is for who runs this test only

    assert METRICS["mae"].score(output, target) == pytest.approx(float(tm.mean_absolute_error(*flat)))
    assert METRICS["mse"].score(output, target) == pytest.approx(float(tm.mean_squared_error(*flat)))
    assert METRICS["rmse"].score(output, target) == pytest.approx(float(tm.mean_squared_error(*flat, squared=False)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_pooled_errors_are_those_of_all_samples(sizes: list[int], seed: int) -> None:
    output, target = numbers(sum(sizes), 2, seed)
    parts = list(zip(output.split(sizes), target.split(sizes), strict=True))
    for name in ("rmse", "mse", "mae"):
        metric = METRICS[name]
        scores = np.array([metric.score(*part) for part in parts])
        assert metric.pooled(scores, np.array(sizes)) == pytest.approx(metric.score(output, target))
