"""The reversible layer: two coupled states whose iteration can be run backwards (McCallum et al., 2025, RevDEQ).

    y ← (1-β)y + βf(z),  z ← (1-β)z + βf(y)

Each line can be solved for what it replaced, so the backward pass recomputes every state from the last one, and
backpropagates through one call of f at a time: the exact gradient of the iterations that were performed, in memory that
does not depend on their number. Going back divides by 1-β, so rounding errors grow by up to (1 + βL)/(1-β) per step,
where L is the Lipschitz constant of f. The two states are therefore kept in float64, also if f is computed in float32.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.equilibrium.fixed_point import Solution, computed
from equipoise.equilibrium.implicit_gradient import SECOND
from equipoise.errors import EquipoiseError

Function = Callable[..., Tensor]
"""f as a function of z and of the tensors that it uses."""
States = tuple[Tensor, Tensor, Tensor]
"""The last y and z in float64, and the number of steps of each sample."""


@dataclass(frozen=True)
class Reversible:
    """An iteration with its settings."""

    f: Function
    per_sample: int
    "number of tensors, of those that f uses, that have one row per sample; they are the first ones"
    damping: float
    "β"
    tol: float
    limit: int
    "largest number of evaluations of f; a step has two, and there is at least one step"
    undone: Callable[[Tensor, Tensor], None]
    "is told after a backward pass how many steps each sample went back, and how far from its start it ended"

    def run(self, start: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Solution, States]:
        """Iterate until every sample has converged or the limit is reached.

        A sample that has converged, or whose next state would not be finite, stays as it is.

        Returns:
            the solution, whose f is z, and the states from which the iteration can go back.
        """
        n, dtype = len(start), start.dtype
        y = z = start.detach().double()
        steps = torch.zeros(n, dtype=torch.int64, device=start.device)
        residual = torch.full((n,), torch.inf, dtype=torch.float64, device=start.device)
        finite, active = torch.ones_like(steps, dtype=torch.bool), torch.ones_like(steps, dtype=torch.bool)
        with torch.no_grad():
            for _ in range(max(1, self.limit // 2)):
                rows = active.nonzero().flatten()
                part = [_take(t, rows, n) if k < self.per_sample else t for k, t in enumerate(tensors)]
                before = _take(z, rows, n)
                f_z = computed(self.f, before.to(dtype), *part)
                next_y = torch.lerp(_take(y, rows, n), f_z.double(), self.damping)
                f_y = computed(self.f, next_y.to(dtype), *part).double()
                next_z = torch.lerp(before, f_y, self.damping)
                error = _lengths(f_y - next_y) / (_TINY + _lengths(f_y))
                well = error.isfinite() & _rows(next_z).isfinite().all(1)
                moved, kept = rows[well], well.nonzero().flatten()
                y = _put(y, moved, _take(next_y, kept, len(rows)))
                z = _put(z, moved, _take(next_z, kept, len(rows)))
                steps[moved] += 1
                residual[moved] = error[well]
                finite[rows[~well]] = False
                active &= finite & (residual > self.tol)
                if not active.any():
                    break
        iterations = 2 * (steps + (~finite).long())
        # Copies: whoever gets the result may change it, and the backward pass begins at y and z.
        given, found = (t.to(dtype, copy=True) for t in (y, z))
        return Solution(given, found, iterations, residual, residual <= self.tol, finite), (y, z, steps)


def reversible(run: Reversible, start: Tensor, tensors: list[Tensor]) -> tuple[Tensor, Solution]:
    """Return the z of a reversible iteration, with the exact gradient of its steps for `tensors`, and the solution."""
    found: list[Solution] = []
    result: Tensor = _Reversible.apply(run, found, start, *tensors)
    return result, found[0]


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Reversible, found: list[Solution], start: Tensor, *tensors: Tensor) -> Tensor:
        # The context must not lead to the result, which leads to it: both would stay until garbage is collected.
        solution, ctx.last = run.run(start, tensors)
        ctx.run, ctx.start, ctx.autocast = run, start.detach(), _autocast(start.device.type)
        ctx.save_for_backward(*tensors)
        found.append(solution)
        value: Tensor = solution.f
        return value

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise EquipoiseError(SECOND)
        wanted = list(ctx.needs_input_grad[3:])
        with ctx.autocast():
            return (None, None, None, *_backward(ctx.run, ctx.start, ctx.last, ctx.saved_tensors, wanted, v))


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what restores the present state of autocast, so that f is the same function in the backward pass."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled, cache_enabled=False)


def _backward(
    run: Reversible, start: Tensor, last: States, tensors: tuple[Tensor, ...], wanted: list[bool], v: Tensor
) -> list[Tensor | None]:
    y, z, steps = last
    beta, dtype = run.damping, v.dtype
    to_z = v.double()
    to_y = torch.zeros_like(to_z)
    totals = [torch.zeros_like(t) if w else None for t, w in zip(tensors, wanted, strict=True)]
    for k in reversed(range(int(steps.max()) if len(steps) else 0)):
        rows = (steps > k).nonzero().flatten()
        y_k, z_k, gy, gz = (_take(t, rows, len(steps)) for t in (y, z, to_y, to_z))
        # z' = (1-β)z + βf(y'): find z, then pass the gradient of z' on to y' and z.
        f_y, back = _with_products(run, y_k.to(dtype), tensors, wanted, rows)
        z_k = (z_k - beta * f_y) / (1 - beta)
        gy = gy + back(beta * gz, totals)
        gz = (1 - beta) * gz
        # y' = (1-β)y + βf(z): the same for y.
        f_z, back = _with_products(run, z_k.to(dtype), tensors, wanted, rows)
        y_k = (y_k - beta * f_z) / (1 - beta)
        gz = gz + back(beta * gy, totals)
        gy = (1 - beta) * gy
        y, z, to_y, to_z = _put(y, rows, y_k), _put(z, rows, z_k), _put(to_y, rows, gy), _put(to_z, rows, gz)
    # Where going back does not end at the start, rounding has spoilt the early states.
    run.undone(steps, _lengths(z - start.double()) / (_TINY + _lengths(last[1])))
    return totals


_TINY = torch.finfo(torch.float64).tiny


def _rows(states: Tensor) -> Tensor:
    return states.reshape(len(states), states.shape[1:].numel())


def _lengths(states: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(_rows(states), dim=1)
    return found


def _take(t: Tensor, rows: Tensor, n: int) -> Tensor:
    """Return these of n rows; all of them are not copied."""
    return t if len(rows) == n else t[rows]


def _put(t: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """Return t with these rows replaced."""
    return new if len(rows) == len(t) else t.index_copy(0, rows, new)


def _with_products(
    run: Reversible, at: Tensor, tensors: tuple[Tensor, ...], wanted: list[bool], rows: Tensor
) -> tuple[Tensor, Callable[[Tensor, list[Tensor | None]], Tensor]]:
    """Return f at these states, and the function that adds its vector-Jacobian products to totals."""
    n = len(tensors[0]) if run.per_sample else len(rows)
    part = [(_take(t, rows, n) if k < run.per_sample else t).detach() for k, t in enumerate(tensors)]
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        given = [t.requires_grad_() if w else t for t, w in zip(part, wanted, strict=True)]
        value = run.f(at, *given)

    def back(v: Tensor, totals: list[Tensor | None]) -> Tensor:
        learning = [t for t, w in zip(given, wanted, strict=True) if w]
        if not value.requires_grad:
            return torch.zeros_like(v)
        by_z, *found = torch.autograd.grad(value, [at, *learning], v.to(value.dtype), allow_unused=True)
        places = [k for k, w in enumerate(wanted) if w]
        for k, g in zip(places, found, strict=True):
            total = totals[k]
            if g is not None and total is not None:
                if k < run.per_sample:
                    total.index_add_(0, rows, g)
                else:
                    total += g
        return torch.zeros_like(v) if by_z is None else by_z.double()

    return value.detach().double(), back
