"""Gradients of fixed points: against finite differences, against unrolling, against each other, against torchdeq."""

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchdeq import get_deq

from equipoise.equilibrium import SOLVERS, ContractiveLinear, Equilibrium
from equipoise.errors import EquipoiseError
from equipoise.models.blocks import EquilibriumBlock, softplus
from equipoise.training.memory_usage import peak_tensor_bytes
from tests.support.fixed_points import random
from tests.support.marks import slow_except

EXACT: dict[str, Any] = {"tol": 1e-12, "limit": 500}


class Dense(nn.Module):
    def __init__(self, width: int = 5, kappa: float = 0.8):
        super().__init__()
        self.b = ContractiveLinear(width, width, kappa)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.b(z) + x)
        return out


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


FUNCTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (Dense, (3, 5)),
    "convolutional": (lambda: EquilibriumBlock(8, 8, "softplus"), (2, 8, 3, 3)),
}


def weighed(out: Tensor) -> Tensor:
    """A loss that weighs every output differently."""
    return (out * random(*out.shape, seed=7)).sum() + out.square().sum()


def gradients(f: nn.Module, x: Tensor, **given: Any) -> list[Tensor]:
    """Of that loss, for the input and every parameter."""
    x = x.detach().requires_grad_()
    layer = Equilibrium(f, **{**EXACT, **given})
    out = layer(x)
    loss = weighed(out)
    return list(torch.autograd.grad(loss, [x, *f.parameters()]))


@pytest.mark.parametrize("solver", slow_except(SOLVERS, "broyden"))
@pytest.mark.parametrize("name", slow_except(FUNCTIONS, "dense"))
def test_implicit_gradients_are_those_of_finite_differences(name: str, solver: str) -> None:
    make, shape = FUNCTIONS[name]
    f = seeded(make)
    layer = Equilibrium(f, solver=solver, backward_tol=1e-13, **EXACT)
    names, values = zip(*f.named_parameters(), strict=True)

    def output(x: Tensor, *parameters: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(
            layer, {f"f.{k}": p for k, p in zip(names, parameters, strict=True)}, (x,)
        )
        return out.flatten()[:: max(1, out.numel() // 10)]

    inputs = (random(*shape).requires_grad_(), *(v.detach().clone().requires_grad_() for v in values))
    assert torch.autograd.gradcheck(output, inputs, eps=1e-6, atol=1e-6, rtol=1e-5, fast_mode=name != "dense")


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("backward", list(SOLVERS))
@pytest.mark.parametrize("name", slow_except(FUNCTIONS, "dense"))
def test_implicit_gradients_are_those_of_unrolling(name: str, solver: str, backward: str) -> None:
    make, shape = FUNCTIONS[name]
    f, x = seeded(make), random(*shape)
    unrolled = gradients(f, x, gradient="unroll", limit=200)
    implicit = gradients(f, x, solver=solver, backward_solver=backward)
    for ours, theirs in zip(implicit, unrolled, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_implicit_gradients_are_those_of_torchdeq(name: str) -> None:
    make, shape = FUNCTIONS[name]
    f, x = seeded(make), random(*shape)
    ours = gradients(f, x)
    theirs_x = x.detach().requires_grad_()
    deq = get_deq(
        ift=True, f_solver="anderson", b_solver="anderson", f_max_iter=300, b_max_iter=300, f_tol=1e-12, b_tol=1e-12
    )
    ((out,), *_), _ = deq(lambda z: f(z, theirs_x), torch.zeros_like(x), solver_kwargs={"lam": 1e-20}), None
    loss = weighed(out)
    theirs = torch.autograd.grad(loss, [theirs_x, *f.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_adjoint_has_a_closed_form_for_a_linear_layer() -> None:
    """z = A z + x: ∂l/∂x = (I - Aᵀ)⁻¹ ∂l/∂z, and ∂l/∂A is the outer product of that with z."""
    a = 0.3 * random(4, 4)
    parameter, x = a.clone().requires_grad_(), random(2, 4, seed=2).requires_grad_()
    out = Equilibrium(lambda z, x: z @ parameter.T + x, **EXACT)(x)
    v = random(2, 4, seed=3)
    by_a, by_x = torch.autograd.grad((out * v).sum(), [parameter, x])
    inverse = torch.linalg.inv(torch.eye(4).double() - a)
    z, gamma = x.detach() @ inverse.T, v @ inverse
    torch.testing.assert_close(out, z, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(by_x, gamma, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(by_a, gamma.T @ z, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_jacobian_free_is_one_pass_through_f_at_the_fixed_point(name: str) -> None:
    make, shape = FUNCTIONS[name]
    f, x = seeded(make), random(*shape)
    z = Equilibrium(f, **EXACT)(x).detach()
    given_x = x.clone().requires_grad_()
    out = f(z, given_x)
    loss = weighed(out)
    once = torch.autograd.grad(loss, [given_x, *f.parameters()])
    for ours, expected in zip(gradients(f, x, gradient="jacobian-free"), once, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_every_iteration_backward_comes_nearer_to_the_gradient_from_jacobian_free_on(name: str) -> None:
    """γ = v to begin with, and one iteration gives Jᵀv + v: the second term of Neumann's series."""
    make, shape = FUNCTIONS[name]
    f, x = seeded(make), random(*shape)
    exact = gradients(f, x)

    def error(**given: Any) -> float:
        return sum(float((a - b).norm()) for a, b in zip(exact, gradients(f, x, **given), strict=True))

    errors = [error(gradient="jacobian-free")]
    for k in (1, 2, 4, 8, 16):
        errors.append(error(backward_solver="plain", backward_tol=0.0, backward_limit=k))
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.05 * errors[0]


@given(st.integers(0, 10_000), st.floats(0.1, 0.9))
@settings(max_examples=25)
def test_jacobian_free_descends_where_f_is_a_contraction(seed: int, scale: float) -> None:
    """Fung et al., 2022: f = z B' + x, of which the input's gradients are v and (I - B')⁻¹v, at an acute angle."""
    b = random(4, 4, seed=seed)
    b *= scale / torch.linalg.matrix_norm(b, ord=2)
    x, v = random(1, 4, seed=seed + 1).requires_grad_(), random(1, 4, seed=seed + 2)
    found = []
    for gradient in ("jacobian-free", "implicit"):
        out = Equilibrium(lambda z, x: z @ b.T + x, gradient=gradient, **EXACT)(x)
        found.append(torch.autograd.grad((out * v).sum(), x)[0])
    torch.testing.assert_close(found[0], v)
    assert (found[0] * found[1]).sum() > 0


@pytest.mark.parametrize("gradient", ["implicit", "jacobian-free", "phantom", "neumann", "unroll"])
def test_training_and_prediction_give_the_same_output(gradient: str) -> None:
    f, x = seeded(Dense), random(3, 5)
    layer = Equilibrium(f, gradient=gradient, solver="plain", tol=0.0, limit=6)
    with torch.no_grad():
        predicted = layer(x)
    assert torch.equal(layer(x), predicted)
    assert layer(x).requires_grad
    assert not predicted.requires_grad


def test_nothing_is_solved_backward_where_nothing_learns() -> None:
    f = seeded(Dense).requires_grad_(False)
    layer = Equilibrium(f, **EXACT)
    assert not layer(random(3, 5)).requires_grad
    x = random(3, 5).requires_grad_()
    layer(x).sum().backward()  # the input learns
    assert layer.last_backward is not None
    assert x.grad is not None


def test_gradients_of_gradients_are_refused() -> None:
    x = random(3, 5).requires_grad_()
    out = Equilibrium(seeded(Dense), **EXACT)(x)
    with pytest.raises(EquipoiseError, match="use gradient = 'unroll'"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["implicit", "jacobian-free"])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_memory_does_not_depend_on_the_number_of_iterations(solver: str, gradient: str) -> None:
    block = EquilibriumBlock(16, 32, "softplus")
    x = torch.randn(8, 16, 12, 12)

    def peak(limit: int, gradient: str = gradient) -> int:
        layer = Equilibrium(block, solver=solver, window=4, tol=0.0, limit=limit, gradient=gradient)
        layer.quiet = True
        return peak_tensor_bytes(lambda: layer(x).sum().backward())

    few = peak(6)
    assert peak(60) <= 1.01 * few
    assert peak(60, "unroll") > 3 * peak(6, "unroll")  # so that the measurement can see it


@pytest.mark.parametrize("gradient", ["implicit", "jacobian-free"])
def test_nothing_stays_behind_when_the_result_is_let_go(gradient: str) -> None:
    """Without a run of the garbage collector: a cycle would keep a step's activations until it comes."""
    x = random(3, 5).requires_grad_()
    kept: list[weakref.ref[Tensor]] = []

    class Watched(Dense):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            out = super().forward(z, x)
            kept.append(weakref.ref(out))
            return out

    gc.disable()
    try:
        layer = Equilibrium(seeded(Watched), gradient=gradient, **EXACT)
        out = layer(x)
        out.sum().backward()
        del out
        assert kept
        assert not [k for k in kept if k() is not None]
    finally:
        gc.enable()


@given(st.integers(0, 10_000))
@settings(max_examples=8)
def test_softplus_keeps_its_result_and_has_the_usual_derivative(seed: int) -> None:
    x = (30 * random(7, seed=seed)).requires_grad_()
    torch.testing.assert_close(softplus(x), torch.nn.functional.softplus(x))
    (ours,) = torch.autograd.grad(softplus(x).sum(), x)
    torch.testing.assert_close(ours, torch.sigmoid(x.detach()), rtol=1e-9, atol=1e-12)
    assert torch.autograd.gradcheck(softplus, (random(5, seed=seed).requires_grad_(),))
    stacked = torch.func.vmap(torch.func.grad(lambda v: softplus(v).sum()))(x.detach().view(7, 1))
    torch.testing.assert_close(stacked.flatten(), ours)
