"""The gradient of a fixed point, without a record of the iterations that led to it.

At z = f(z, x; θ) the implicit function theorem gives ∂l/∂θ = γᵀ ∂f/∂θ with γ = Jᵀγ + ∂l/∂z and J = ∂f/∂z: again a
fixed point, found with vector-Jacobian products only (FL-DEQ, Eqs. 9-13; FeDEQ, Eq. 4). Jacobian-free backpropagation
(Fung et al., 2022) takes γ = ∂l/∂z.

Phantom gradients (Geng et al., 2021) take k damped steps in place of the solve, with a damping λ. Their sum is
γ = λ Σ_{i<k} (λJᵀ + (1-λ)I)ⁱ ∂l/∂z. For k → ∞ it tends to the implicit gradient if λJ + (1-λ)I has a spectral radius
below one; with k = 1 and λ = 1 it is Jacobian-free.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError

SECOND = (
    "the gradient of an equilibrium cannot be differentiated again; use gradient = 'unroll', "
    "or gradient = 'implicit' with torch.func.grad or torch.func.hessian"
)
Adjoint = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""Solves γ = Jᵀγ + v, given the right-hand side as a function of γ, and v."""


def attach(f: Callable[[Tensor], Tensor], z: Tensor, adjoint: Adjoint | None) -> Tensor:
    """Return f(z) at a fixed point z, as a tensor that has the fixed point's gradient.

    Args:
        f: the function.
        z: the fixed point.
        adjoint: the solver of the gradient's fixed point; without it, the gradient is Jacobian-free.
    """
    if adjoint is None:
        value = f(z)
        if value.grad_fn is not None:  # not if f returns what it was given
            value.register_hook(_refuse_second)
        return value
    z = z.detach().requires_grad_()
    result: Tensor = _Implicit.apply(f(z), z, adjoint)
    return result


def _refuse_second(v: Tensor) -> None:
    if torch.is_grad_enabled():  # the solves are not recorded, so that terms would be missing
        raise EquipoiseError(SECOND)


def phantom(f: Callable[[Tensor], Tensor], z: Tensor, value: Tensor, steps: int, damping: float) -> Tensor:
    """Return `value` as a tensor that has the gradient of damped steps z ← (1-λ)z + λf(z), which autograd records.

    The steps move only if z is not quite a fixed point; then J is taken where they are, and not only at z.

    Args:
        f: the function.
        z: the fixed point.
        value: f(z), the result. Without it the result would move on with the steps, and differ from a prediction.
        steps: number of steps, k.
        damping: their size, λ.
    """
    result: Tensor = _InPlaceOf.apply(damped_steps(f, z.detach(), steps, damping), value)
    return result


def damped_steps(f: Callable[[Tensor], Tensor], z: Tensor, steps: int, damping: float) -> Tensor:
    """Return the state after steps z ← (1-λ)z + λf(z)."""
    for _ in range(steps):
        z = f(z) if damping == 1 else torch.lerp(z, f(z).to(z.dtype), damping)
    return z


def neumann(right_side: Callable[[Tensor], Tensor], v: Tensor, steps: int, damping: float) -> Tensor:
    """Return γ = λ Σ_{i<k} (λJᵀ + (1-λ)I)ⁱ v, the gradient of damped steps that stay at the fixed point.

    Args:
        right_side: Jᵀγ + v as a function of γ.
        v: the gradient of the result.
        steps: number of terms, k.
        damping: λ.
    """
    gamma = damping * v
    for _ in range(steps - 1):
        gamma = torch.lerp(gamma, right_side(gamma).to(gamma.dtype), damping)
    return gamma


class _InPlaceOf(torch.autograd.Function):
    """Returns `value`, with the gradient of `moving`."""

    @staticmethod
    def forward(ctx: Any, moving: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None]:
        _refuse_second(v)
        return v, None


class _Implicit(torch.autograd.Function):
    """The identity on f(z); its backward pass replaces the gradient v by γ, which then goes through f once."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, z: Tensor, adjoint: Adjoint) -> Tensor:
        # The graph of f is used for every product with Jᵀ. This node refers to it and not the other way round, so that
        # both are freed together with the result.
        ctx.tape, ctx.adjoint = (value, z), adjoint
        return value.clone()  # a view could not be changed in place by the next operation

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        _refuse_second(v)
        value, z = ctx.tape

        def right_side(gamma: Tensor) -> Tensor:
            product: Tensor | None
            (product,) = torch.autograd.grad(value, z, gamma, retain_graph=True, allow_unused=True)
            return v.clone() if product is None else product + v

        return ctx.adjoint(right_side, v), None, None
