"""Calls of the reversible layer: what happens to its result, what stays in memory, autocast, and kinds of f."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.equilibrium import Equilibrium, NotConverged, set_budget
from equipoise.errors import EquipoiseError
from tests.support.fixed_points import Dense, random


def layer_of(f: Any, **given: Any) -> Equilibrium:
    return Equilibrium(f, gradient="reversible", **{"tol": 0.0, "limit": 8, **given})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_may_be_changed_in_place(dtype: torch.dtype) -> None:
    f, x = Dense().to(dtype), random(3, 5).to(dtype).requires_grad_()
    (expected,) = torch.autograd.grad(2 * layer_of(f)(x).sum(), x)
    out = layer_of(f)(x)
    out.mul_(2)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, expected)


def test_its_tensors_are_freed_without_the_garbage_collector() -> None:
    layer, x = layer_of(Dense()), random(3, 5).requires_grad_()
    gc.collect()
    gc.disable()
    try:
        results = []
        for _ in range(3):
            out = layer(x)
            results.append(weakref.ref(out))
            out.sum().backward()
            del out
        assert [r() for r in results] == [None] * 3
    finally:
        gc.enable()


class InPlace(Dense):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        z.mul_(0.5)
        return super().forward(z, x)


@pytest.mark.parametrize("gradient", ["implicit", "reversible", "unroll"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_f_that_changes_z_in_place_is_refused(gradient: str, dtype: torch.dtype) -> None:
    with pytest.raises(EquipoiseError, match="f changes z in place"):
        Equilibrium(InPlace().to(dtype), gradient=gradient)(random(3, 5).to(dtype))


def test_the_backward_pass_computes_f_under_the_autocast_of_the_forward_pass() -> None:
    """The gradient is that of the same iterations, recorded under autocast."""
    f, x = Dense().float(), random(3, 5).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer_of(f)(x)
        y = z = torch.zeros_like(x)
        for _ in range(4):
            y = 0.5 * y + 0.5 * f(z, x)
            z = 0.5 * z + 0.5 * f(y, x)
    torch.testing.assert_close(out, z, rtol=1e-2, atol=1e-2)
    found, expected = (torch.autograd.grad(o.sum(), [x, *f.parameters()]) for o in (out, z))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # and not under that of the backward pass
        inside = torch.autograd.grad(out_of(f, x), x)[0]
    assert torch.equal(inside, torch.autograd.grad(out_of(f, x), x)[0])


def out_of(f: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        out: Tensor = layer_of(f)(x).sum()
        return out


def test_a_state_of_one_number_per_sample() -> None:
    """It is the same as a row of one number."""
    x = random(3).requires_grad_()
    layer = layer_of(lambda z, x: 0.5 * torch.tanh(z) + x)
    found, expected = (torch.autograd.grad(out.square().sum(), x)[0] for out in (layer(x), layer(x[:, None])))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("budget", "used"), [(1, 2), (2, 2), (3, 2), (5, 4)])
def test_a_budget_is_rounded_down_to_whole_steps_and_one_step_is_the_least(budget: int, used: int) -> None:
    f = Dense()
    layer = layer_of(f)
    set_budget(layer, budget)
    f.samples = 0
    layer(random(3, 5))
    assert f.samples == 3 * used == layer.tally.iterations


def test_steps_that_cannot_be_undone_are_counted_and_reported_with_the_layer() -> None:
    x = random(3, 5).requires_grad_()
    layer = layer_of(Dense(scale=0.9), damping=0.9, limit=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = layer(x)
    with pytest.warns(NotConverged, match=r"layer of Dense cannot undo its steps exactly in 3 of 3 solves") as found:
        out.sum().backward()
    assert found[0].filename == __file__
    counted = layer.solves.backward
    assert (counted.solves, counted.unconverged, counted.intended) == (3, 3, 0)
    assert counted.iterations == layer.tally.iterations
    assert "cannot undo" in layer.complaints(layer.solves)[0][1]  # what a run reports
    good = layer_of(Dense())
    good(x).sum().backward()
    assert (good.solves.backward.solves, good.solves.backward.unconverged) == (3, 0)
