"""The gradient of a fixed point, without a record of the iterations that led to it.

At z = f(z, x; θ) the implicit function theorem gives ∂l/∂θ = γᵀ ∂f/∂θ with γ = Jᵀγ + ∂l/∂z and J = ∂f/∂z: again a
fixed point, found with vector-Jacobian products only (FL-DEQ, Eqs. 9-13; FeDEQ, Eq. 4). Jacobian-free backpropagation
(Fung et al., 2022) takes γ = ∂l/∂z.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError

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
        return f(z)
    z = z.detach().requires_grad_()
    value: Tensor = _Implicit.apply(f(z), z, adjoint)
    return value


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
        if torch.is_grad_enabled():  # γ would have to be differentiable, but its solve is not recorded
            raise EquipoiseError("an implicit gradient cannot be differentiated again; use gradient = 'unroll'")
        value, z = ctx.tape

        def right_side(gamma: Tensor) -> Tensor:
            product: Tensor | None
            (product,) = torch.autograd.grad(value, z, gamma, retain_graph=True, allow_unused=True)
            return v.clone() if product is None else product + v

        return ctx.adjoint(right_side, v), None, None
