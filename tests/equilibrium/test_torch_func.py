"""Transforms of torch.func through a layer, against unrolling; and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from equipoise.equilibrium import SOLVERS, Equilibrium, WarmStart, solve
from equipoise.errors import EquipoiseError
from tests.support.fixed_points import Dense, random

TIGHT: dict[str, Any] = {"tol": 1e-12, "limit": 100}
MANY: dict[str, Any] = {"phantom_steps": 70, "damping": 0.9}
"""So many steps that phantom gradients are exact."""
MODES = {"implicit": {}, "phantom": MANY, "neumann": MANY}
WEIGHTS = random(4, 5, seed=7)
X = random(3, 5)
V = random(3, 5, seed=4)
Parameters = dict[str, Tensor]


def layer_of(gradient: str, **given: Any) -> Equilibrium:
    return Equilibrium(Dense(), gradient=gradient, **{**TIGHT, **MODES.get(gradient, {}), **given})


UNROLLED = layer_of("unroll", limit=60)
P: Parameters = {name: p.detach() for name, p in UNROLLED.named_parameters()}
STACK: Parameters = {name: torch.stack([p, 0.5 * p, -p]) for name, p in P.items()}


def loss(layer: Equilibrium) -> Callable[[Parameters, Tensor], Tensor]:
    def value(p: Parameters, x: Tensor) -> Tensor:
        out = functional_call(layer, p, (x,))
        return (out * WEIGHTS[: len(out)]).sum() + out.square().sum()

    return value


TRANSFORMS: dict[str, Callable[[Equilibrium], Any]] = {
    "grad": lambda layer: grad(loss(layer), argnums=(0, 1))(P, X),
    "vjp": lambda layer: vjp(layer, X)[1](V),
    "jvp": lambda layer: jvp(layer, (X,), (V,)),
    "jvp for parameters": lambda layer: jvp(lambda p: loss(layer)(p, X), (P,), (P,)),
    "jacrev": lambda layer: jacrev(layer)(X),
    "jacfwd": lambda layer: jacfwd(layer)(X),
    "vmap over samples": lambda layer: vmap(lambda x: layer(x[None])[0])(X),
    "gradients per sample": lambda layer: vmap(grad(lambda p, x: loss(layer)(p, x[None])), (None, 0))(P, X),
    "stacked clients": lambda layer: vmap(grad(loss(layer)))(STACK, torch.stack([X, X + 1, 2 * X])),
    "two stacks": lambda layer: vmap(vmap(loss(layer), (None, 0)), (0, None))(STACK, torch.stack([X, 2 * X])),
}
SECOND: dict[str, Callable[[Equilibrium], Any]] = {
    "hessian": lambda layer: hessian(loss(layer), argnums=1)(P, X),
    "grad of grad": lambda layer: grad(lambda p: sum(g.square().sum() for g in grad(loss(layer))(p, X).values()))(P),
    "jvp of grad": lambda layer: jvp(lambda x: grad(loss(layer), argnums=1)(P, x), (X,), (V,)),
    "grad of a linear loss's grad": lambda layer: grad(lambda x: grad(lambda x: layer(x).sum())(x)[0, 0])(X),
}


@pytest.mark.parametrize("gradient", list(MODES))
@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_transforms_give_what_they_give_for_the_unrolled_layer(name: str, gradient: str) -> None:
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(layer_of(gradient)), transform(UNROLLED), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", list(SECOND))
def test_second_derivatives_are_those_of_the_unrolled_layer(name: str) -> None:
    transform = SECOND[name]
    torch.testing.assert_close(transform(layer_of("implicit")), transform(UNROLLED), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("gradient", ["jacobian-free", "phantom", "neumann"])
@pytest.mark.parametrize("name", list(SECOND))
def test_second_derivatives_of_approximate_gradients_are_refused(name: str, gradient: str) -> None:
    with pytest.raises(EquipoiseError, match="approximate gradient of an equilibrium cannot be differentiated again"):
        SECOND[name](layer_of(gradient))


@pytest.mark.parametrize("gradient", ["implicit", "jacobian-free", "phantom", "neumann", "reversible"])
def test_second_derivatives_of_plain_autograd_are_refused(gradient: str) -> None:
    x = X.clone().requires_grad_()
    out = layer_of(gradient, limit=20, damping=0.5)(x)
    with pytest.raises(EquipoiseError, match="cannot be differentiated again; use gradient = 'unroll', or"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("gradient", ["implicit", "jacobian-free", "phantom", "neumann", "unroll"])
def test_inside_and_outside_a_transform_it_is_the_same_layer(gradient: str) -> None:
    layer = layer_of(gradient, tol=1e-4, limit=20, phantom_steps=3)
    x = X.clone().requires_grad_()
    out = layer(x)
    found, back = vjp(layer, X)
    torch.testing.assert_close(found, out.detach(), rtol=1e-12, atol=1e-12)
    (expected,) = torch.autograd.grad(out, x, V)
    # Inside, J is taken at the result f(z) and not at z, so that it can be differentiated again.
    exact = gradient in ("jacobian-free", "phantom", "unroll")
    torch.testing.assert_close(back(V)[0], expected, rtol=1e-12 if exact else 1e-3, atol=1e-12)


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_solves_are_counted_and_stop_by_themselves(solver: str) -> None:
    layer = layer_of("implicit", solver=solver)
    grad(loss(layer), argnums=1)(P, X)
    assert layer.solves.forward.solves == layer.solves.backward.solves == 3
    assert 1 < layer.solves.forward.mean < 60
    assert not layer.solves.forward.unconverged
    vmap(lambda x: layer(x[None])[0])(X)
    assert layer.solves.forward.solves == 6
    assert layer.last is not None
    assert layer.last.iterations.shape == (3,)


def test_plain_autograd_goes_through_a_transform() -> None:
    layer = layer_of("implicit")
    found = []
    for out in (vmap(lambda x: layer(x[None])[0])(X), layer(X)):
        found.append(torch.autograd.grad(out.square().sum(), list(layer.parameters())))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-9)


class Two(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return 0.1 * self.inner(z[1], x) + x, 0.1 * torch.tanh(z[0])


def test_a_state_of_several_tensors() -> None:
    given: dict[str, Any] = {"guess": lambda x: (torch.zeros_like(x), torch.zeros_like(x))}
    f = Two(Dense())
    layers = Equilibrium(f, **given, **TIGHT), Equilibrium(f, gradient="unroll", limit=20, **given)
    found, expected = (jacrev(lambda x, layer=layer: layer(x)[0])(X) for layer in layers)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_whole_numbers_among_the_inputs_have_no_derivative() -> None:
    layer = Equilibrium(lambda z, x, k: 0.1 * k[:, None] * z + x, **TIGHT)
    k = torch.tensor([1, 2, 5])
    found = grad(lambda x: layer(x, k).sum())(X)
    torch.testing.assert_close(found, (1 / (1 - 0.1 * k.double()))[:, None].expand(3, 5), rtol=1e-8, atol=1e-9)


def test_what_cannot_work_is_refused() -> None:
    def hidden(w: Tensor) -> Tensor:
        out: Tensor = Equilibrium(lambda z, x: 0.1 * z @ w + x)(X).sum()
        return out

    with pytest.raises(EquipoiseError, match="make f a module that has them as parameters"):
        grad(hidden)(random(5, 5))
    learning = random(5, 5).requires_grad_()
    with pytest.raises(EquipoiseError, match="make f a module that has them as parameters"):
        vmap(lambda x: Equilibrium(lambda z, x: 0.1 * z @ learning + x)(x[None]))(X)
    with pytest.raises(EquipoiseError, match="gradient = 'reversible' does not work"):
        vjp(layer_of("reversible", damping=0.5), X)
    layer = layer_of("implicit")
    with (
        pytest.raises(EquipoiseError, match="a warm start does not work"),
        WarmStart(layer, 3).at([0, 1, 2]),
    ):
        grad(lambda x: layer(x).sum())(X)
    with pytest.raises(EquipoiseError, match="a jvp within a jvp does not work"):
        jacfwd(jacfwd(layer))(X)
    nested = Two(Equilibrium(Dense(), **TIGHT))
    with pytest.raises(EquipoiseError, match="an equilibrium within an equilibrium does not work"):
        vjp(lambda x: Equilibrium(nested)(x, z=(x, x))[0], X)
    with pytest.raises(EquipoiseError, match="solve does not work within transforms"):
        grad(lambda x: solve(lambda z: 0.5 * z + x, x).f.sum())(X)
