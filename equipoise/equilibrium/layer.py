"""A layer that is defined by what it leaves unchanged: z = f(z, x)."""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.equilibrium.fixed_point import Solution, residuals, solve
from equipoise.equilibrium.implicit_gradient import attach
from equipoise.equilibrium.options import Options
from equipoise.equilibrium.solve_stats import NotConverged, Solves, SolveStats
from equipoise.equilibrium.solvers import SOLVERS, Solver
from equipoise.errors import EquipoiseError
from equipoise.settings import read

Memory = Callable[[Tensor], tuple[Tensor, Callable[[Solution], None]]]


class Equilibrium(nn.Module):
    """z = f(z, x), found by a solver and differentiated without its iterations, in the memory of one call of f.

    `f` is a module, or function, of (z, x, ...). Tensors among the inputs have a row a sample; f treats each sample for
    itself, since it is called with fewer of them as some are done, and does the same in every call of a forward pass
    (no dropout, no BatchNorm). What all samples share belongs into f. `settings` are those of `Options`, and `solver`
    may also be an object such as Anderson(window=8).

    The result is f(z, x) at the z that was found, in training and out of it; only with gradient = "unroll", training
    applies f `limit` times, and prediction solves. z has the shape of the first input unless a guess is given with the
    call.
    """

    def __init__(self, f: Callable[..., Tensor], options: Options | None = None, **settings: Any):
        super().__init__()
        self.f, self.options = f, _options(options, settings)
        if not callable(f) or isinstance(f, type):
            raise EquipoiseError(f"an equilibrium layer needs a module or a function f(z, x), and this is {f!r}")
        self.name = f"of {getattr(f, '__name__', type(f).__name__)}"
        "for readers of complaints; layers of a model get their place in it (see `layers`)"
        self.budget: int | None = None
        "most iterations of a solve, forward and backward, for those who cannot afford more; no complaints then"
        self.memory: Memory | None = None
        "gives the first guess in place of the default one, and takes what was found (see `WarmStart`)"
        self.last: Solution | None = None
        "what the last solve came to; z and f are left out of it"
        self.last_backward: Solution | None = None
        "what the last solve for a gradient came to"
        self.solves = Solves()
        "what all solves came to, for fixed points and for gradients"
        self.quiet = False
        "leave complaints to whoever reads the counts"
        self._complained = {"forward": 0.0, "backward": 0.0}
        _warn_of_what_changes(f)

    @property
    def tally(self) -> SolveStats:
        """Over all forward passes."""
        return self.solves.forward

    def forward(self, *inputs: Any, z: Tensor | None = None) -> Tensor:
        """The fixed point for these inputs, from the guess z, from what is remembered, or from the default guess."""
        start, keep = self._start(inputs, z)
        if self.options.gradient == "unroll" and torch.is_grad_enabled():
            value, solution = self._unroll(start, inputs)
        else:
            given = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
            tol, limit = self._bounds("forward")
            solver = self.options.method(self.options.solver)
            solution = solve(self.f, start, given, solver=solver, tol=tol, limit=limit)
            value = solution.f
        self.last = self._note(solution, "forward")
        if keep is not None:
            keep(solution)
        if self.options.gradient == "unroll" or not self._learns(inputs):
            return value
        implicit = self.options.gradient == "implicit"
        return attach(lambda z: self.f(z, *inputs), solution.z, self._adjoint if implicit else None)

    def _start(self, inputs: tuple[Any, ...], z: Tensor | None) -> tuple[Tensor, Callable[[Solution], None] | None]:
        if not inputs and z is None:
            raise EquipoiseError("an equilibrium layer needs an input, or a guess: layer(x) or layer(z=guess)")
        default = z
        if default is None:
            x = inputs[0]
            if not isinstance(x, Tensor) or not x.is_floating_point():
                what = f"{x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise EquipoiseError(f"the first input of an equilibrium layer has the kind of z: numbers, not {what}")
            default = torch.zeros_like(x) if self.options.start == "zero" else x
        if self.memory is None:
            return default.detach(), None
        remembered, keep = self.memory(default.detach())
        return (remembered if z is None else z.detach()), keep

    @property
    def limit(self) -> int:
        """Most iterations of a forward solve: the budget, if it is less than what the options say."""
        return self._limit(self.options.limit)

    def _limit(self, limit: int) -> int:
        return limit if self.budget is None else min(limit, self.budget)

    def _learns(self, inputs: tuple[Any, ...]) -> bool:
        if not torch.is_grad_enabled():
            return False
        if not isinstance(self.f, nn.Module):
            return True  # a function may hide parameters; only of a module is it known that it has none that learn
        given = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return given or any(p.requires_grad for p in self.f.parameters())

    def _unroll(self, z: Tensor, inputs: tuple[Any, ...]) -> tuple[Tensor, Solution]:
        limit = self._limit(self.options.limit)
        for _ in range(limit):
            z, before = self.f(z, *inputs), z
            if z.shape != before.shape:
                raise EquipoiseError(f"f(z) has the shape {tuple(z.shape)}, and z {tuple(before.shape)}")
        with torch.no_grad():
            found, f, d = before.detach(), z.detach(), z.shape[1:].numel()
            residual = torch.from_numpy(residuals(found.reshape(len(z), d), f.reshape(len(z), d)))
        finite = residual.isfinite()
        residual = torch.where(finite, residual, torch.inf)
        used = torch.full((len(z),), limit)
        return z, Solution(found, f, used, residual, residual <= self.options.tol, finite)

    def _adjoint(self, right_side: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        tol, limit = self._bounds("backward")
        solver = self.options.method(self.options.backward_solver or self.options.solver)
        solution = solve(right_side, v, solver=solver, tol=tol, limit=limit)
        self.last_backward = self._note(solution, "backward")
        return solution.f

    def complaints(self, solves: Solves) -> list[tuple[float, str]]:
        """What is wrong with these solves, which others may have counted, each with the part that it is true of."""
        found = []
        for way, tally in (("forward", solves.forward), ("backward", solves.backward)):
            if tally.unconverged:
                found.append((tally.failed, tally.complaint(_described(self.name, way), *self._bounds(way))))
        return found

    def _bounds(self, way: str) -> tuple[float, int]:
        """Tolerance and limit of a solve."""
        o = self.options
        if way == "forward":
            return o.tol, self._limit(o.limit)
        return (o.tol if o.backward_tol is None else o.backward_tol), self._limit(o.backward_limit or o.limit)

    def _note(self, solution: Solution, way: str) -> Solution:
        """Count it, complain if need be, and return it without its values."""
        own = self.options.limit if way == "forward" else self.options.backward_limit or self.options.limit
        now = SolveStats.of(solution, self.budget is not None and self.budget < own)
        getattr(self.solves, way).add(now)
        badness = torch.inf if now.diverged else now.residual
        # Told once, and again only when it has become much worse.
        if now.unconverged and not self.quiet and badness > 10 * self._complained[way]:
            self._complained[way] = badness
            text = now.complaint(_described(self.name, way), *self._bounds(way))
            warnings.warn(text, NotConverged, stacklevel=_users_level())
        nothing = solution.z.new_empty(0)
        return Solution(nothing, nothing, solution.iterations, solution.residual, solution.converged, solution.finite)

    def extra_repr(self) -> str:
        o = self.options
        return f"solver={o.solver}, tol={o.tol:g}, limit={o.limit}, gradient={o.gradient}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Equilibrium":
        """A copy has counts and complaints of its own, and shares no memory of samples."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.__dict__ = {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in ("memory", "solves")}
        new.memory, new.solves, new._complained = None, Solves(), {"forward": 0.0, "backward": 0.0}
        return new


def _options(options: Options | None, settings: dict[str, Any]) -> Options:
    if options is not None and not isinstance(options, Options):
        raise EquipoiseError(f"the options of an equilibrium layer are an Options object, and this is {options!r}")
    if options is not None and settings:
        raise EquipoiseError("an equilibrium layer takes its options either as one object or one by one, not both")
    if isinstance(solver := settings.get("solver"), Solver):
        name = next(name for name, cls in SOLVERS.items() if isinstance(solver, cls))
        settings = {**settings, **solver.table(), "solver": name}
    return options or read(Options, settings, "Equilibrium")


def _warn_of_what_changes(f: object) -> None:
    """Layers with which f(z) is not the same when it is computed again."""
    restless = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for layer in f.modules() if isinstance(f, nn.Module) else ():
        if isinstance(layer, restless):
            warnings.warn(
                f"f has a {type(layer).__name__}, so that f(z) is not the same in every call, and there may be no "
                "fixed point; GroupNorm and LayerNorm are the same, and dropout belongs outside",
                stacklevel=_users_level(),
            )
            return


_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _users_level() -> int:
    """How far up the stack, from the caller, the user's own code is."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    return level


def _described(name: str, way: str) -> str:
    layer = f"the equilibrium layer {name}"
    return layer if way == "forward" else f"the gradient of {layer}"


def layers(module: nn.Module) -> Iterator[tuple[str, Equilibrium]]:
    """Every equilibrium layer in a module, by its place; from then on its complaints name it so."""
    for name, layer in module.named_modules():
        if isinstance(layer, Equilibrium):
            if name:
                layer.name = repr(name)
            yield name, layer


def set_budget(module: nn.Module, iterations: int | None) -> None:
    """Let no equilibrium layer in a module use more iterations than this, either way; None: as they are set."""
    whole = isinstance(iterations, int) and not isinstance(iterations, bool)
    if iterations is not None and (not whole or iterations < 1):
        raise EquipoiseError(f"a budget of {iterations!r} iterations is not allowed; it must be a whole number >= 1")
    for _, layer in layers(module):
        layer.budget = iterations
