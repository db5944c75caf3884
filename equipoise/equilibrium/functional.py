"""Fixed points within transforms of torch.func: grad, vjp, jvp, jacrev, jacfwd, hessian and vmap.

Solvers decide by numbers when to stop, which tensors inside a transform do not show. So every solve is an operation of
its own, which gets plain tensors. Its rules are:

- vmap: problems are put one after another as more samples of one solve, since samples do not influence each other;
- derivatives: at u = f(u, θ) a tangent or a gradient passes through f once, and then (I - J)⁻¹ or its transpose is
  applied by solving a linear equation. That equation is a fixed point as well, and is differentiated by the same rule,
  so that second derivatives are right.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp

from equipoise.equilibrium.pure_call import StackedCall, stack_rows
from equipoise.errors import EquipoiseError

ONCE = "the approximate gradient of an equilibrium cannot be differentiated again"
Solver = Callable[[Callable[[Tensor], Tensor], Tensor, str], Tensor]
"""Solves u = g(u) for g, a first guess, and "forward" or "backward"; returns u."""


@dataclass(frozen=True)
class Problem:
    """A fixed point z = f(z, θ) with the solver that finds it."""

    f: Callable[..., Tensor]
    "the function of z and of all tensors θ that it uses"
    solve: Solver
    series: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None
    "approximates u = Ju + v or u = Jᵀu + v, given the right-hand side and v, if these are not solved"

    def stacked(self, size: int, in_dims: tuple[int | None, ...]) -> "Problem":
        """Return the problem for a stack of θ."""
        return replace(self, f=StackedCall(self.f, size, in_dims))


def fixed_point(problem: Problem, start: Tensor, tensors: list[Tensor]) -> Tensor:
    """Return the fixed point, without derivatives."""
    value: Tensor = _Solve.apply(problem, start.detach(), *(t.detach() for t in tensors))
    return value


def with_derivatives(problem: Problem, z: Tensor, tensors: list[Tensor]) -> Tensor:
    """Return f(z) at a fixed point z, with the fixed point's derivatives in both modes, also second ones."""
    value: Tensor = _Implicit.apply(problem, z.detach(), *tensors)
    return value


def once_differentiable(value: Tensor, tensors: list[Tensor]) -> Tensor:
    """Return `value`, whose derivatives are approximate, so that derivatives of these are refused."""
    result: Tensor = _Once.apply(value, *tensors)
    return result


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, *tensors: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        return _Never.apply(v, *ctx.saved_tensors), *(None for _ in ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Tensor | None) -> Tensor:
        result: Tensor = _Never.apply(tangent, *ctx.saved_tensors)
        return result


class _Never(torch.autograd.Function):
    """The identity on v, which depends on the tensors, so that every second derivative comes by and is refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(v: Tensor, *tensors: Tensor) -> Tensor:
        return v.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise EquipoiseError(f"{ONCE}; use gradient = 'implicit' or 'unroll'")

    @staticmethod
    def jvp(ctx: Any, *_: Tensor) -> None:
        raise EquipoiseError(f"{ONCE}; use gradient = 'implicit' or 'unroll'")


class _Solve(torch.autograd.Function):
    """Finds the fixed point, from plain tensors."""

    @staticmethod
    def forward(problem: Problem, start: Tensor, *tensors: Tensor) -> Tensor:
        return problem.solve(lambda z: problem.f(z, *tensors), start, "forward").clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        return None  # the inputs are detached

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], problem: Problem, start: Tensor, *tensors: Tensor) -> Any:
        size = info.batch_size
        value = _Solve.apply(problem.stacked(size, in_dims[2:]), stack_rows(start, size, in_dims[1]), *tensors)
        return value.unflatten(0, (size, -1)), 0


class _Implicit(torch.autograd.Function):
    """f(z, θ) at a fixed point; θ's gradients are ∂f/∂θᵀ(I - Jᵀ)⁻¹v, and its tangents t become (I - J)⁻¹ ∂f/∂θ t."""

    @staticmethod
    def forward(problem: Problem, z: Tensor, *tensors: Tensor) -> Tensor:
        return problem.f(z, *tensors).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        problem, _, *tensors = inputs
        ctx.problem = problem
        # The result, and not z, so that second derivatives know how the fixed point moves.
        ctx.save_for_backward(output, *tensors)
        ctx.save_for_forward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        z, *tensors = ctx.saved_tensors
        gamma = _linear(ctx.problem, z, tensors, v, transposed=True)
        f, learning = _of_floats(ctx.problem, z, tensors)
        found = iter(vjp(f, *learning)[1](gamma))
        return None, None, *(next(found) if t.is_floating_point() else None for t in tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        z, *tensors = ctx.saved_tensors
        f, learning = _of_floats(ctx.problem, z, tensors)
        given = [t for t, x in zip(tangents[2:], tensors, strict=True) if x.is_floating_point()]
        known = tuple(torch.zeros_like(x) if t is None else t for t, x in zip(given, learning, strict=True))
        return _linear(ctx.problem, z, tensors, jvp(f, tuple(learning), known)[1], transposed=False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], problem: Problem, z: Tensor, *tensors: Tensor) -> Any:
        size = info.batch_size
        found = _Implicit.apply(problem.stacked(size, in_dims[2:]), stack_rows(z, size, in_dims[1]), *tensors)
        return found.unflatten(0, (size, -1)), 0


def _of_floats(problem: Problem, z: Tensor, tensors: list[Tensor]) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return f as a function of those tensors that have derivatives, and these tensors."""

    def f(*learning: Tensor) -> Tensor:
        left = iter(learning)
        return problem.f(z, *(next(left) if t.is_floating_point() else t for t in tensors))

    return f, [t for t in tensors if t.is_floating_point()]


def _linear(problem: Problem, z: Tensor, tensors: list[Tensor], v: Tensor, transposed: bool) -> Tensor:
    """Solve u = Ju + v, or u = Jᵀu + v, by the same rules."""

    def right_side(u: Tensor, v: Tensor, z: Tensor, *tensors: Tensor) -> Tensor:
        def f(z: Tensor) -> Tensor:
            return problem.f(z, *tensors)

        if transposed:
            (product,) = vjp(f, z)[1](u)
        else:
            product = jvp(f, (z,), (u,))[1]
        result: Tensor = product + v
        return result

    if problem.series is not None:
        return problem.series(lambda u: right_side(u, v, z, *tensors), v)
    linear = Problem(right_side, lambda g, start, way: problem.solve(g, start, "backward"))
    given = [v, z, *tensors]
    return with_derivatives(linear, fixed_point(linear, v, given), given)
