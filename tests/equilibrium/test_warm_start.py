"""Warm starts by sample: where a solve begins, and what is remembered of it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.equilibrium import Equilibrium, WarmStart
from equipoise.errors import EquipoiseError
from tests.support.fixed_points import EXACT, Dense, Recorded, random


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 5))
@settings(max_examples=25)
def test_a_warm_start_is_exact_about_shuffling(seed: int, n: int, batch: int) -> None:
    """With f unchanged, every epoch after the first takes one iteration a sample, in whatever order they come."""
    layer = Equilibrium(Dense(), **EXACT)
    x = random(n, 5, seed=seed)
    expected = layer(x).detach()
    warm = WarmStart(layer, n)
    rng = torch.Generator().manual_seed(seed)
    for epoch in range(3):
        for index in torch.randperm(n, generator=rng).split(batch):
            with warm.at(index):
                out = layer(x[index])
            torch.testing.assert_close(out, expected[index], rtol=1e-8, atol=1e-9)
            assert epoch == 0 or layer.last.iterations.tolist() == [1] * len(index)


def test_unknown_samples_start_as_the_layer_says() -> None:
    f = Recorded()
    layer = Equilibrium(f, start="input", **EXACT)
    warm, x = WarmStart(layer, 4), random(4, 3)
    with warm.at(torch.tensor([2, 0])):
        layer(x[[2, 0]])
    f.seen.clear()
    with warm.at(torch.tensor([1, 0])):
        layer(x[[1, 0]])
    assert torch.equal(f.seen[0][0], x[1])
    torch.testing.assert_close(f.seen[0][1], 2 * x[0], rtol=1e-8, atol=1e-8)


def test_outside_of_it_nothing_is_remembered() -> None:
    layer = Equilibrium(Dense(), **EXACT)
    warm, x = WarmStart(layer, 3), random(3, 5)
    with warm.at(torch.arange(3)):
        layer(x)
    cold = layer.last.iterations
    layer(x)
    assert torch.equal(layer.last.iterations, cold)
    off = Equilibrium(Dense(), warm_start="off", **EXACT)
    with WarmStart(off, 3).at(torch.arange(3)):
        off(x)
        off(x)
    assert torch.equal(off.last.iterations, cold)


def test_a_fixed_point_that_was_not_found_is_not_remembered() -> None:
    layer = Equilibrium(lambda z, x: 3 * z * z + x, solver="plain", limit=100)
    layer.quiet = True
    warm = WarmStart(layer, 2)
    x = torch.tensor([[0.01], [1.0]])
    with warm.at(torch.arange(2)):
        layer(x)
    assert warm.slots[0].known.tolist() == [True, False]
    assert warm.slots[0].z.isfinite().all()
    with warm.at(torch.arange(2)):
        layer(torch.full((2, 1), torch.nan))  # not even f(0) is a number
    assert warm.slots[0].z.isfinite().all()
    assert not warm.slots[0].known.any()


def test_what_is_remembered_can_be_written_down_and_read_again() -> None:
    layer = Equilibrium(Dense(), warm_start="client", **EXACT)
    warm, x = WarmStart(layer, 3), random(3, 5)
    assert warm.tensors() == {}
    with warm.at(torch.tensor([0, 2])):
        layer(x[[0, 2]])
    again = WarmStart(layer, 3)
    again.load(warm.tensors())
    with again.at(torch.arange(3)):
        layer(x)
    assert layer.last.iterations[[0, 2]].tolist() == [1, 1]
    assert int(layer.last.iterations[1]) > 1


def test_a_warm_start_keeps_the_layout_of_images() -> None:
    layouts: list[bool] = []

    def f(z: Tensor, x: Tensor) -> Tensor:
        layouts.append(z.is_contiguous(memory_format=torch.channels_last))
        return 0.5 * z + x

    layer = Equilibrium(f, **EXACT)
    warm = WarmStart(layer, 4)
    x = random(4, 3, 5, 2).contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        with warm.at(torch.arange(4)):
            layer(x)
    assert all(layouts)


@pytest.mark.parametrize("index", [[0, 3], [-1, 0], [[0], [1]], [0.0, 1.0], [True, False, True]])
def test_numbers_of_samples_are_checked(index: Any) -> None:
    layer = Equilibrium(Dense(), **EXACT)
    with pytest.raises(EquipoiseError, match="from 0 to 2, one per sample"), WarmStart(layer, 3).at(index):
        pass
    with (
        pytest.raises(EquipoiseError, match="the batch has 2 samples, but index has 3"),
        WarmStart(layer, 3).at(torch.arange(3)),
    ):
        layer(random(2, 5))
    assert layer.memory is None


def test_a_guess_that_is_given_wins_over_what_is_remembered() -> None:
    f = Recorded()
    layer = Equilibrium(f, **EXACT)
    x, guess = random(2, 3), random(2, 3, seed=5)
    warm = WarmStart(layer, 2)
    for expected, z in ((0 * x, None), (guess, guess), (2 * x, None)):
        f.seen.clear()
        with warm.at([0, 1]):
            layer(x, z=z)
        torch.testing.assert_close(f.seen[0], expected, rtol=1e-8, atol=1e-8)


def test_a_table_fits_more_and_fewer_samples() -> None:
    layer = Equilibrium(Dense(), **EXACT)
    x = random(6, 5)
    warm = WarmStart(layer, 4)
    with warm.at(torch.arange(4)):
        layer(x[:4])
    for n in (2, 6):
        other = WarmStart(layer, n)
        other.load(warm.tensors())
        with other.at(torch.arange(n)):
            layer(x[:n])
        assert [k == 1 for k in layer.last.iterations.tolist()] == [k < 4 for k in range(n)]


def test_a_table_begins_anew_when_samples_have_become_of_another_kind() -> None:
    layer = Equilibrium(lambda z, x: 0.5 * z + x, **EXACT)
    warm = WarmStart(layer, 2)
    for x in (random(2, 3), random(2, 4), random(2, 4).float()):
        with warm.at([0, 1]):
            torch.testing.assert_close(layer(x), 2 * x, rtol=1e-5, atol=1e-6)
        assert warm.tensors()["0.z"].dtype == x.dtype


def test_an_equilibrium_within_an_equilibrium_is_not_remembered() -> None:
    """It is called with ever fewer samples, and with another input in every iteration of the outer one."""
    inner = Equilibrium(Dense(scale=0.3), **EXACT)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.5 * self.inner(z) + x

    layer = Equilibrium(Outer(), tol=1e-8, limit=100)
    x = random(6, 5) * torch.logspace(-2, 1, 6).double()[:, None]
    warm = WarmStart(nn.Sequential(layer), 6)
    assert len(warm.slots) == 1
    for _ in range(2):
        with warm.at(torch.arange(6)):
            out = layer(x)
    torch.testing.assert_close(out, 0.5 * inner(out) + x, rtol=1e-6, atol=1e-7)
