"""The reversible layer: the gradient of its own iteration, memory, limits, rounding."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.equilibrium import Equilibrium, NotConverged, set_budget
from equipoise.errors import EquipoiseError
from equipoise.models.blocks import EquilibriumBlock
from equipoise.training.memory_usage import peak_tensor_bytes
from tests.support.fixed_points import Dense, random


def recorded(f: nn.Module, x: Tensor, damping: float, steps: int) -> Tensor:
    """The same iteration, through which autograd goes."""
    y = z = torch.zeros_like(x)
    for _ in range(steps):
        y = (1 - damping) * y + damping * f(z, x)
        z = (1 - damping) * z + damping * f(y, x)
    return z


def layer_of(f: nn.Module, **given: Any) -> Equilibrium:
    layer = Equilibrium(f, gradient="reversible", **given)
    layer.quiet = True
    return layer


def both(f: nn.Module, x: Tensor, damping: float, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    x = x.detach().requires_grad_()
    v = random(*x.shape, seed=3).to(x.dtype)
    found = []
    for out in (layer_of(f, damping=damping, tol=0.0, limit=2 * steps)(x), recorded(f, x, damping, steps)):
        found.append([out.detach(), *torch.autograd.grad((out * v).sum(), [x, *f.parameters()])])
    return found[0], found[1]


@given(steps=st.integers(1, 12), damping=st.floats(0.05, 0.7), scale=st.floats(0.1, 2))
@settings(max_examples=8)
def test_its_gradient_is_that_of_its_iteration(steps: int, damping: float, scale: float) -> None:
    """To rounding, also where f is no contraction and nothing converges.

    A step back multiplies rounding errors by up to (1 + βL) / (1 - β), where L is the Lipschitz constant of f.
    """
    ours, theirs = both(Dense(scale=scale), random(3, 5), damping, steps)
    rounding = 1e-12 + 1e-15 * ((1 + damping * scale) / (1 - damping)) ** steps
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding)


def test_it_is_that_of_finite_differences_and_of_the_convolutional_block() -> None:
    f = Dense()
    x = random(2, 5).requires_grad_()
    assert torch.autograd.gradcheck(layer_of(f, tol=0.0, limit=12), (x,))
    torch.manual_seed(0)
    ours, theirs = both(EquilibriumBlock(8, 8, "softplus").double(), random(2, 8, 3, 3), 0.5, 6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_its_limit_is_the_implicit_gradient() -> None:
    f, x = Dense(scale=0.5), random(3, 5).requires_grad_()
    exact = torch.autograd.grad(Equilibrium(f, tol=1e-12, limit=300)(x).square().sum(), [x, *f.parameters()])
    errors = []
    for steps in (2, 5, 12):
        out = layer_of(f, damping=0.6, tol=0.0, limit=2 * steps)(x)
        found = torch.autograd.grad(out.square().sum(), [x, *f.parameters()])
        errors.append(sum(float((a - b).norm()) for a, b in zip(found, exact, strict=True)))
    assert errors[1] < 0.2 * errors[0]
    assert errors[2] < 0.02 * errors[1]


@pytest.mark.parametrize(("damping", "steps"), [(0.5, 10), (0.5, 25), (0.8, 10)])
def test_in_single_precision_it_is_as_exact_as_autograd(damping: float, steps: int) -> None:
    """The states are kept in float64; with float32 states the error would be about 6e-8 / (1 - damping)^steps."""
    f, x = Dense(scale=0.9), random(6, 5)
    _, exact = both(f, x, damping, steps)
    ours, theirs = both(f.float(), x.float(), damping, steps)

    def error(found: list[Tensor]) -> float:
        return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found[1:], exact[1:], strict=True))

    assert ours[0].dtype == torch.float32
    assert error(ours) < 5 * error(theirs)
    assert error(ours) < 1e-6


def test_steps_that_cannot_be_undone_are_reported() -> None:
    f, x = Dense(scale=0.9), random(3, 5).requires_grad_()
    layer = Equilibrium(f, gradient="reversible", damping=0.9, tol=0.0, limit=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = layer(x)
    with pytest.warns(NotConverged, match=r"cannot undo its steps .* smaller damping or limit"):
        out.sum().backward()


def test_samples_stop_by_themselves() -> None:
    f = Dense(scale=0.9)
    x = (random(6, 5) * torch.logspace(-2, 1, 6).double()[:, None]).requires_grad_()
    layer = layer_of(f, tol=1e-4, limit=80)
    out = layer(x)
    assert layer.last is not None
    assert layer.last.converged.all()
    used = layer.last.iterations.tolist()
    assert len(set(used)) > 1
    assert all(k % 2 == 0 for k in used)
    (whole,) = torch.autograd.grad(out.square().sum(), x)
    for k, n in enumerate(used):
        alone = x[k : k + 1].detach().requires_grad_()
        (expected,) = torch.autograd.grad(recorded(f, alone, 0.5, n // 2).square().sum(), alone)
        torch.testing.assert_close(whole[k : k + 1], expected, rtol=1e-6, atol=1e-8)


def test_a_prediction_is_the_same_and_a_budget_counts_evaluations() -> None:
    f, x = Dense(), random(3, 5)
    layer = layer_of(f, tol=0.0, limit=30)
    set_budget(layer, 8)
    f.samples = 0
    with torch.no_grad():
        predicted = layer(x)
    assert f.samples == 8 * 3
    assert torch.equal(layer(x), predicted)
    assert layer(x).requires_grad
    assert layer.tally.iterations == 3 * 3 * 8


def test_a_sample_that_diverges_stays_finite_and_the_others_do_not_notice() -> None:
    class Square(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 3 * z * z + x

    x = torch.tensor([[0.01], [1e200]], dtype=torch.float64, requires_grad=True)
    layer = layer_of(Square(), tol=1e-8, limit=60)
    out = layer(x)
    assert out.isfinite().all()
    assert layer.last is not None
    assert layer.last.finite.tolist() == [True, False]
    (found,) = torch.autograd.grad(out[0].sum(), x)
    torch.testing.assert_close(found[0], (1 - 12 * x[0].detach()) ** -0.5, rtol=1e-6, atol=1e-6)


def test_memory_does_not_depend_on_the_number_of_steps() -> None:
    block, x = EquilibriumBlock(8, 16, "softplus"), torch.randn(2, 8, 6, 6)

    def peak(limit: int, gradient: str) -> int:
        layer = Equilibrium(block, tol=0.0, limit=limit, gradient=gradient)
        layer.quiet = True
        return peak_tensor_bytes(lambda: layer(x).sum().backward())

    assert peak(24, "reversible") <= 1.01 * peak(4, "reversible")
    assert peak(24, "unroll") > 3 * peak(4, "unroll")  # so that the measurement can see it


def test_what_it_cannot_do_is_refused() -> None:
    x = random(3, 5).requires_grad_()
    with pytest.raises(EquipoiseError, match="a damping below 1"):
        layer_of(Dense(), damping=1.0)
    with pytest.raises(EquipoiseError, match="cannot be differentiated again"):
        torch.autograd.grad(layer_of(Dense())(x).sum(), x, create_graph=True)
    w = random(5, 5).requires_grad_()
    with pytest.raises(EquipoiseError, match="make f a module"):
        Equilibrium(lambda z, x: 0.1 * z @ w + x, gradient="reversible")(x)
    (found,) = torch.autograd.grad(Equilibrium(lambda z, x: 0.1 * z + x, gradient="reversible")(x).sum(), x)
    torch.testing.assert_close(found, torch.full_like(x, 1 / 0.9), rtol=1e-2, atol=1e-2)
    with pytest.raises(EquipoiseError, match="f\\(z\\) must have the shape of z"):
        layer_of(nn.Bilinear(5, 5, 4).double())(x)
