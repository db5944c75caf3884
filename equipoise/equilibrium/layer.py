"""A layer that is defined by what it leaves unchanged: z = f(z, x)."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.equilibrium.gradient import attach
from equipoise.equilibrium.options import Options
from equipoise.equilibrium.solve import Solution, solve
from equipoise.equilibrium.tally import NotConverged, Tally
from equipoise.errors import EquipoiseError


class Equilibrium(nn.Module):
    """z = f(z, x), found by a solver and differentiated without its iterations, in the memory of one call of f.

    `f` is a module, or function, of (z, x, ...) that treats each sample for itself and does the same in every call of a
    forward pass (no dropout, no BatchNorm). `settings` are those of `Options`. The result is f(z, x) at the z that was
    found, in training and out of it.
    """

    def __init__(self, f: Callable[..., Tensor], options: Options | None = None, **settings: Any):
        super().__init__()
        if options is not None and settings:
            raise EquipoiseError("an equilibrium layer takes its options either as one object or one by one, not both")
        self.f, self.options = f, options or Options(**settings)
        self.name = f"of {type(f).__name__}"
        "for readers of complaints; layers of a model get their place in it (see `layers`)"
        self.budget: int | None = None
        "most iterations of a solve, forward and backward, for those who cannot afford more; no complaints then"
        self.memory: Callable[[Tensor], tuple[Tensor, Callable[[Solution], None]]] | None = None
        "gives the first guess in place of the default one, and takes what was found (see `WarmStart`)"
        self.last: Solution | None = None
        "what the last solve came to; z and f are left out of it"
        self.last_backward: Solution | None = None
        "what the last solve for a gradient came to"
        self.tally = Tally()
        "over all forward passes"
        self.quiet = False
        "leave complaints to whoever reads the tally"
        self._complained = 0.0

    def forward(self, *inputs: Tensor, z: Tensor | None = None) -> Tensor:
        """The fixed point for these inputs, from the guess z, from what is remembered, or from the default guess."""
        if z is None:
            z = torch.zeros_like(inputs[0]) if self.options.start == "zero" else inputs[0].detach()
        keep = None
        if self.memory is not None:
            z, keep = self.memory(z)
        if self.options.gradient == "unroll" and torch.is_grad_enabled():
            return self._unroll(z.detach(), inputs)
        solution = solve(
            self.f,
            z,
            [x.detach() for x in inputs],
            solver=self.options.method(self.options.solver),
            tol=self.options.tol,
            limit=self._limit(self.options.limit),
        )
        self._note(solution)
        if keep is not None:
            keep(solution)
        if not self._learns(inputs):
            return solution.f
        implicit = self.options.gradient == "implicit"
        return attach(lambda z: self.f(z, *inputs), solution.z, self._adjoint if implicit else None)

    def _limit(self, limit: int) -> int:
        return limit if self.budget is None else min(limit, self.budget)

    def _learns(self, inputs: tuple[Tensor, ...]) -> bool:
        parameters = self.f.parameters() if isinstance(self.f, nn.Module) else iter(())
        if not torch.is_grad_enabled():
            return False
        # A function that is no module may hide parameters: only a module can be known to have nothing to learn.
        hidden = not isinstance(self.f, nn.Module)
        return hidden or any(x.requires_grad for x in inputs) or any(p.requires_grad for p in parameters)

    def _unroll(self, z: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        for _ in range(self._limit(self.options.limit)):
            z = self.f(z, *inputs)
        return z

    def _adjoint(self, right_side: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        options = self.options
        solution = solve(
            right_side,
            v,
            solver=options.method(options.backward_solver or options.solver),
            tol=options.tol if options.backward_tol is None else options.backward_tol,
            limit=self._limit(options.backward_limit or options.limit),
        )
        self.last_backward = _without_values(solution)
        return solution.f

    def _note(self, solution: Solution) -> None:
        self.last = _without_values(solution)
        now = Tally()
        now.add(solution, self.budget is not None)
        self.tally.merge(now)
        if self.quiet or now.unconverged == 0:
            return
        badness = torch.inf if now.diverged else now.residual
        if badness > 10 * self._complained:  # once, and again only when it has become much worse
            self._complained = badness
            text = now.complaint(self.name, self.options.tol, self._limit(self.options.limit))
            warnings.warn(str(text), NotConverged, stacklevel=3)

    def extra_repr(self) -> str:
        o = self.options
        return f"solver={o.solver}, tol={o.tol:g}, limit={o.limit}, gradient={o.gradient}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Equilibrium":
        """A copy has counts of its own, and shares no memory of samples."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.__dict__ = {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in ("memory", "tally")}
        new.memory, new.tally = None, Tally()
        return new


def _without_values(solution: Solution) -> Solution:
    nothing = solution.z.new_empty(0)
    return Solution(nothing, nothing, solution.iterations, solution.residual, solution.converged, solution.finite)


def layers(module: nn.Module) -> Iterator[tuple[str, Equilibrium]]:
    """Every equilibrium layer in a module, by its place; from then on its complaints name it so."""
    for name, layer in module.named_modules():
        if isinstance(layer, Equilibrium):
            if name:
                layer.name = repr(name)
            yield name, layer


def set_budget(module: nn.Module, iterations: int | None) -> None:
    """Let no equilibrium layer in a module use more iterations than this, either way; None: as they are set."""
    if iterations is not None and (not isinstance(iterations, int) or iterations < 1):
        raise EquipoiseError(f"a budget of {iterations!r} iterations is not allowed; it must be a whole number >= 1")
    for _, layer in layers(module):
        layer.budget = iterations
