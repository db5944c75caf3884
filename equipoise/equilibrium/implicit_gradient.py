"""The derivative of a fixed point, without a trace of the iterations that led to it.

At z = f(z, x; θ) the implicit function theorem gives ∂l/∂θ = γᵀ ∂f/∂θ with γ = Jᵀγ + ∂l/∂z and J = ∂f/∂z: again a
fixed point, found with products of vectors and J alone (FL-DEQ, Eqs. 9-13; FeDEQ, Eq. 4). Jacobian-free backpropagation
(Fung et al., 2022) takes γ = ∂l/∂z.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError

Adjoint = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""Solves γ = Jᵀγ + v: from the function of γ on the right-hand side, and v."""


def attach(f: Callable[[Tensor], Tensor], z: Tensor, adjoint: Adjoint | None) -> Tensor:
    """f(z) at a fixed point z, as a tensor that knows its gradient; without `adjoint`, Jacobian-free."""
    if adjoint is None:
        return f(z)
    z = z.detach().requires_grad_()
    value: Tensor = _Implicit.apply(f(z), z, adjoint)
    return value


class _Implicit(torch.autograd.Function):
    """The identity on f(z); on the way back it replaces the gradient v by γ, which then goes through f once."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, z: Tensor, adjoint: Adjoint) -> Tensor:
        # The tape of f is used for every product with Jᵀ. It hangs on this node and not the other way round, so that
        # both are freed when the caller lets go of the result.
        ctx.tape, ctx.adjoint = (value, z), adjoint
        return value.clone()  # a view could not be changed in place by whoever comes next

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # the caller wants to go on through γ, whose solve leaves no trace
            raise EquipoiseError(
                "gradients of gradients cannot be had through an implicit gradient; use gradient = 'unroll'"
            )
        value, z = ctx.tape

        def right_side(gamma: Tensor) -> Tensor:
            product: Tensor | None
            (product,) = torch.autograd.grad(value, z, gamma, retain_graph=True, allow_unused=True)
            return v.clone() if product is None else product + v

        return ctx.adjoint(right_side, v), None, None
