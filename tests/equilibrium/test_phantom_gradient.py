"""Phantom gradients: closed forms for linear f, limits, finite differences, unrolling, and torchdeq."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchdeq import get_deq

from equipoise.equilibrium import Equilibrium, set_budget
from equipoise.errors import EquipoiseError
from tests.equilibrium.test_implicit_gradient import EXACT, FUNCTIONS, Dense, gradients, seeded, weighed
from tests.support.fixed_points import random

PHANTOM = ("phantom", "neumann")


def matrix(seed: int, scale: float) -> Tensor:
    b = random(4, 4, seed=seed)
    return b * scale / torch.linalg.matrix_norm(b, ord=2)


@pytest.mark.parametrize("gradient", PHANTOM)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 0.9), steps=st.integers(1, 12), damping=st.floats(0.05, 1))
@settings(max_examples=8)
def test_a_linear_layer_has_a_closed_form(gradient: str, seed: int, scale: float, steps: int, damping: float) -> None:
    """z = B z + x: γ = λ Σ_{i<k} (λBᵀ + (1-λ)I)ⁱ v, ∂l/∂x = γ, ∂l/∂B = γ zᵀ."""
    b = matrix(seed, scale)
    parameter, x = b.clone().requires_grad_(), random(2, 4, seed=seed + 1).requires_grad_()
    given: dict[str, Any] = {"gradient": gradient, "phantom_steps": steps, "damping": damping}
    out = Equilibrium(lambda z, x: z @ parameter.T + x, **EXACT, **given)(x)
    v = random(2, 4, seed=seed + 2)
    by_b, by_x = torch.autograd.grad((out * v).sum(), [parameter, x])
    damped = damping * b + (1 - damping) * torch.eye(4).double()
    gamma = damping * sum(v @ torch.linalg.matrix_power(damped, i) for i in range(steps))
    z = torch.linalg.solve(torch.eye(4).double() - b, x.detach().T).T
    torch.testing.assert_close(by_x, gamma, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(by_b, gamma.T @ z, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_both_forms_are_the_same_at_a_fixed_point(name: str) -> None:
    make, shape = FUNCTIONS[name]
    f, x = seeded(make), random(*shape)
    both = [gradients(f, x, gradient=gradient, phantom_steps=4, damping=0.7) for gradient in PHANTOM]
    for unrolled, series in zip(*both, strict=True):
        torch.testing.assert_close(unrolled, series, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("gradient", PHANTOM)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_one_step_without_damping_is_jacobian_free(name: str, gradient: str) -> None:
    make, shape = FUNCTIONS[name]
    f, x = seeded(make), random(*shape)
    one = gradients(f, x, gradient=gradient, phantom_steps=1, damping=1.0)
    for ours, theirs in zip(one, gradients(f, x, gradient="jacobian-free"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gradient", PHANTOM)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_many_steps_give_the_implicit_gradient(name: str, gradient: str) -> None:
    make, shape = FUNCTIONS[name]
    f, x = seeded(make), random(*shape)
    exact = gradients(f, x)

    def error(steps: int) -> float:
        found = gradients(f, x, gradient=gradient, phantom_steps=steps, damping=0.8)
        return sum(float((a - b).norm()) for a, b in zip(exact, found, strict=True))

    errors = [error(k) for k in (1, 3, 9, 150)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-7 * errors[0]


@pytest.mark.parametrize("gradient", PHANTOM)
def test_with_many_steps_they_are_those_of_finite_differences_and_of_unrolling(gradient: str) -> None:
    f, x = seeded(Dense), random(3, 5).requires_grad_()
    given: dict[str, Any] = {"gradient": gradient, "phantom_steps": 200, "damping": 0.9}
    layer = Equilibrium(f, **EXACT, **given)
    assert torch.autograd.gradcheck(layer, (x,), eps=1e-6, atol=1e-6, rtol=1e-5)
    unrolled = gradients(f, x, gradient="unroll", limit=200)
    for ours, theirs in zip(gradients(f, x, **given), unrolled, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("gradient", PHANTOM)
@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (3, 0.5), (5, 0.8)])
def test_they_are_those_of_torchdeq(gradient: str, steps: int, damping: float) -> None:
    f, x = seeded(FUNCTIONS["convolutional"][0]), random(2, 8, 3, 3)
    ours = gradients(f, x, gradient=gradient, phantom_steps=steps, damping=damping)
    theirs_x = x.detach().requires_grad_()
    deq = get_deq(f_solver="anderson", f_max_iter=300, f_tol=1e-12, grad=steps, tau=damping)
    ((out,), *_), _ = deq(lambda z: f(z, theirs_x), torch.zeros_like(x), solver_kwargs={"lam": 1e-20}), None
    theirs = torch.autograd.grad(weighed(out), [theirs_x, *f.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_away_from_a_fixed_point_only_the_unrolled_form_is_a_derivative() -> None:
    """Its gradient is that of k damped steps from z, here after a single iteration, while the result stays f(z)."""
    f, x = seeded(Dense), random(3, 5).requires_grad_()
    layer = Equilibrium(f, gradient="phantom", phantom_steps=3, damping=0.6, limit=1)
    layer.quiet = True
    out = layer(x)
    torch.testing.assert_close(out, f(torch.zeros_like(x), x))
    z = torch.zeros_like(x)
    for _ in range(3):
        z = 0.4 * z + 0.6 * f(z, x)
    v = random(3, 5, seed=3)
    torch.testing.assert_close(
        torch.autograd.grad((out * v).sum(), x), torch.autograd.grad((z * v).sum(), x), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("gradient", PHANTOM)
def test_a_budget_limits_the_steps(gradient: str) -> None:
    f, x = seeded(Dense), random(3, 5).requires_grad_()
    budgeted = Equilibrium(f, gradient=gradient, tol=0.0, limit=50, phantom_steps=9)
    set_budget(budgeted, 2)
    short = Equilibrium(f, gradient=gradient, tol=0.0, limit=2, phantom_steps=2)
    short.quiet = True
    one, other = (torch.autograd.grad(layer(x).sum(), x)[0] for layer in (budgeted, short))
    assert torch.equal(one, other)


@pytest.mark.parametrize(("key", "value"), [("phantom_steps", 0), ("damping", 0.0), ("damping", 1.5)])
def test_settings_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(EquipoiseError, match=key):
        Equilibrium(seeded(Dense), gradient="phantom", **{key: value})
