"""The equilibrium layer, whose output is a fixed point: z = f(z, x)."""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.equilibrium.fixed_point import Solution, check_rows, residuals, solve, wrong_shape
from equipoise.equilibrium.functional import Problem, fixed_point, once_differentiable, with_derivatives
from equipoise.equilibrium.implicit_gradient import attach, damped_steps, neumann, phantom
from equipoise.equilibrium.options import Options
from equipoise.equilibrium.pure_call import PureCall, inside_nested_jvp, inside_transform, refuse_hidden_tensors
from equipoise.equilibrium.reversible import Reversible, reversible
from equipoise.equilibrium.solve_stats import NotConverged, Solves, SolveStats
from equipoise.equilibrium.solvers import SOLVERS, Solver
from equipoise.equilibrium.states import State, StateLayout
from equipoise.errors import EquipoiseError
from equipoise.settings import read

Memory = Callable[[Tensor], tuple[Tensor, Callable[[Solution], None]]]


class Equilibrium(nn.Module):
    """A layer that solves z = f(z, x), and is differentiated without its iterations, in the memory of one call of f.

    Tensors among the inputs have one row per sample. f must treat samples independently, because samples that have
    converged are no longer part of its calls, and must be the same function in all calls of a forward pass: no dropout,
    no BatchNorm. What all samples share belongs in f.

    The result is f(z, x) at the z that was found, in training and in prediction. Only with gradient = "unroll" does
    training apply f `limit` times, while prediction solves; "reversible" returns its last state. z has the shape of the
    first input, unless there is a guess: a tensor of another shape, or a tuple, list or dictionary of tensors, which f
    then takes and returns.
    """

    def __init__(
        self,
        f: Callable[..., State],
        options: Options | None = None,
        guess: Callable[..., State] | None = None,
        **settings: Any,
    ):
        """Create the layer.

        Args:
            f: a module or function of (z, x, ...).
            options: how it is solved and differentiated.
            guess: returns the first guess for the inputs, if z has not the shape of the first one.
            settings: the same as single settings of `Options`; `solver` may also be an object such as
                Anderson(window=8).
        """
        super().__init__()
        self.f, self.options, self.guess = f, _options(options, settings), guess
        if not callable(f) or isinstance(f, type):
            raise EquipoiseError(f"an equilibrium layer needs a module or a function f(z, x), not {f!r}")
        if self.options.gradient == "reversible" and self.options.damping == 1:
            raise EquipoiseError("gradient = 'reversible' needs a damping below 1: steps of full size cannot be undone")
        self.name = f"of {getattr(f, '__name__', type(f).__name__)}"
        "name in warnings; for layers of a model, their place in it (see `layers`)"
        self.budget: int | None = None
        "iteration limit of a solve, forward and backward, on weak devices; unconverged solves are then not reported"
        self.memory: Memory | None = None
        "returns the first guess, in place of the default one, and stores what was found (see `WarmStart`)"
        self.last: Solution | None = None
        "result of the last solve, without z and f"
        self.last_backward: Solution | None = None
        "result of the last solve for a gradient, without z and f"
        self.solves = Solves()
        "statistics of all solves, for fixed points and for gradients"
        self.quiet = False
        "do not warn; the reader of the statistics reports problems"
        self._warned = {"forward": 0.0, "backward": 0.0}
        _warn_if_calls_differ(f)

    @property
    def tally(self) -> SolveStats:
        """Return the statistics of all forward solves."""
        return self.solves.forward

    def forward(self, *inputs: Any, z: State | None = None) -> Any:
        """Return the fixed point for these inputs, starting at z, at the remembered point, or at the default guess."""
        start, keep, layout = self._start(inputs, z)
        if inside_transform():
            check_rows(start, inputs)
            value = self._transformed(PureCall(self.f, inputs, layout), start)
        else:
            value, solution = self._found(inputs, start, layout)
            if keep is not None:
                keep(solution)
        return value if layout is None else layout.state(value)

    def _found(self, inputs: tuple[Any, ...], start: Tensor, layout: StateLayout | None) -> tuple[Tensor, Solution]:
        """Return the differentiable result and the solution, from rows of numbers if there is a layout."""
        f = self.f if layout is None else layout.of_rows(self.f)
        if self.options.gradient == "reversible":
            return self._reversible(PureCall(self.f, inputs, layout), start)
        if self.options.gradient == "unroll" and torch.is_grad_enabled():
            value, solution = self._unroll(f, start, inputs)
        else:
            given = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
            tol, limit = self._bounds("forward")
            solver = self.options.method(self.options.solver)
            solution = solve(f, start, given, solver=solver, tol=tol, limit=limit)
            value = solution.f
        self.last = self._record(solution, "forward")
        if self.options.gradient == "unroll" or not self._needs_gradient(inputs):
            return value, solution
        return self._differentiable(lambda z: f(z, *inputs), solution), solution

    def _differentiable(self, f: Callable[[Tensor], Tensor], solution: Solution) -> Tensor:
        """Return f at the fixed point, as a tensor that has the gradient of the options."""
        o = self.options
        if o.gradient == "phantom":
            return phantom(f, solution.z, solution.f, self._limit(o.phantom_steps), o.damping)
        adjoints = {"implicit": self._adjoint, "neumann": self._neumann}
        return attach(f, solution.z, adjoints.get(o.gradient))

    def _reversible(self, call: PureCall, start: Tensor) -> tuple[Tensor, Solution]:
        check_rows(start, [call.tensors[k] for k in range(len(call.places))])
        tol, limit = self._bounds("forward")
        needed = torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors)
        if torch.is_grad_enabled() and not isinstance(self.f, nn.Module):
            with torch.enable_grad():
                if call(start, *(t.detach() for t in call.tensors)).requires_grad:
                    raise EquipoiseError(
                        "gradient = 'reversible' must know the parameters; make f a module that has them"
                    )
        run = Reversible(call, len(call.places), self.options.damping, tol, limit, self.quiet)
        value = reversible(run, start, call.tensors) if needed else run.run(start, tuple(call.tensors))
        assert run.solution is not None
        self.last = self._record(run.solution, "forward")
        return value, run.solution

    def _transformed(self, call: PureCall, start: Tensor) -> Tensor:
        """Return the result within transforms of torch.func."""
        o, tensors = self.options, call.tensors
        if o.gradient == "unroll":
            for _ in range(self._limit(o.limit)):
                start = call(start, *tensors)
            return start
        self._refuse_transform()
        refuse_hidden_tensors(call, start)
        problem = Problem(call, self._solved, self._neumann if o.gradient == "neumann" else None)
        z = fixed_point(problem, start, tensors)
        if o.gradient in ("implicit", "neumann"):
            value = with_derivatives(problem, z, tensors)
            return value if o.gradient == "implicit" else once_differentiable(value, tensors)
        value = moving = call(z, *tensors)
        if o.gradient == "phantom":
            moving = damped_steps(lambda z: call(z, *tensors), z, self._limit(o.phantom_steps), o.damping)
            moving = moving + (value - moving).detach()
        return once_differentiable(moving, tensors)

    def _refuse_transform(self) -> None:
        refused = {
            "gradient = 'reversible'": self.options.gradient == "reversible",
            "a warm start": self.memory is not None,
            "an equilibrium within an equilibrium": sum(1 for _ in layers(self)) > 1,
            "a jvp within a jvp": inside_nested_jvp(),
        }
        for what, refuse in refused.items():
            if refuse:
                raise EquipoiseError(
                    f"{what} does not work within transforms of torch.func through an equilibrium layer"
                )

    def _solved(self, f: Callable[[Tensor], Tensor], start: Tensor, way: str) -> Tensor:
        """Solve within a transform, with plain tensors."""
        o = self.options
        name = o.solver if way == "forward" else o.backward_solver or o.solver
        tol, limit = self._bounds(way)
        solution = solve(f, start, solver=o.method(name), tol=tol, limit=limit)
        found = self._record(solution, way)
        if way == "forward":
            self.last = found
        else:
            self.last_backward = found
        z: Tensor = solution.z
        return z

    def _start(
        self, inputs: tuple[Any, ...], z: State | None
    ) -> tuple[Tensor, Callable[[Solution], None] | None, StateLayout | None]:
        """Return the first guess, what stores the result, and the layout of a state of several tensors."""
        if not inputs and z is None:
            raise EquipoiseError("an equilibrium layer needs an input, or a guess: layer(x) or layer(z=guess)")
        default = z
        if default is None and self.guess is not None:
            default = self.guess(*inputs)
        elif default is None:
            x = inputs[0]
            if not isinstance(x, Tensor) or not x.is_floating_point():
                what = f"{x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise EquipoiseError(
                    f"the first input of an equilibrium layer must be a floating-point tensor, not {what}; "
                    "for another kind of state, give a guess"
                )
            default = torch.zeros_like(x) if self.options.start == "zero" else x
        layout = None if isinstance(default, Tensor) else StateLayout(default)
        start: Tensor = default if layout is None else layout.rows(default, "the guess z")
        if self.memory is None or inside_transform():
            return start.detach(), None, layout
        remembered, keep = self.memory(start.detach())
        return (remembered if z is None else start.detach()), keep, layout

    @property
    def limit(self) -> int:
        """Return the iteration limit of a forward solve: that of the options, or the budget if it is smaller."""
        return self._limit(self.options.limit)

    def _limit(self, limit: int) -> int:
        return limit if self.budget is None else min(limit, self.budget)

    def _needs_gradient(self, inputs: tuple[Any, ...]) -> bool:
        if not torch.is_grad_enabled():
            return False
        if not isinstance(self.f, nn.Module):
            return True  # a function may use parameters; only a module can be searched for them
        given = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return given or any(p.requires_grad for p in self.f.parameters())

    def _unroll(self, function: Callable[..., Tensor], z: Tensor, inputs: tuple[Any, ...]) -> tuple[Tensor, Solution]:
        limit = self._limit(self.options.limit)
        for _ in range(limit):
            z, before = function(z, *inputs), z
            if z.shape != before.shape:
                raise EquipoiseError(wrong_shape(before, z))
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
        self.last_backward = self._record(solution, "backward")
        gamma: Tensor = solution.f
        return gamma

    def _neumann(self, right_side: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        return neumann(right_side, v, self._limit(self.options.phantom_steps), self.options.damping)

    def may_stop_unconverged(self, way: str) -> bool:
        """Tell whether unconverged solves, "forward" or "backward", may be intended: tol = 0, or a budget."""
        return self._bounds(way)[0] == 0 or self.options.counted_tol is not None

    def complaints(self, solves: Solves) -> list[tuple[float, str]]:
        """Return the problems of these solves, each as the share of solves that failed and a sentence."""
        found = []
        for way, tally in (("forward", solves.forward), ("backward", solves.backward)):
            if tally.unexpected:
                found.append((tally.unexpected, self._complaint(tally, way)))
        return found

    def _bounds(self, way: str) -> tuple[float, int]:
        """Return the tolerance and the iteration limit of a solve."""
        o = self.options
        if way == "forward":
            return o.tol, self._limit(o.limit)
        return (o.tol if o.backward_tol is None else o.backward_tol), self._limit(o.backward_limit or o.limit)

    def _complaint(self, stats: SolveStats, way: str) -> str:
        tol, limit = self._bounds(way)
        return stats.complaint(_described(self.name, way), self.options.counted_tol or tol, limit)

    def _record(self, solution: Solution, way: str) -> Solution:
        """Count a solve, warn if it failed, and return it without its values."""
        own = self.options.limit if way == "forward" else self.options.backward_limit or self.options.limit
        budgeted = self.budget is not None and self.budget < own
        now = SolveStats.of(solution, self._bounds(way)[0], budgeted, self.options.counted_tol)
        getattr(self.solves, way).add(now)
        badness = torch.inf if now.diverged else now.residual
        # Warn once, and again only when it has become much worse.
        if now.unexpected and not self.quiet and badness > 10 * self._warned[way]:
            self._warned[way] = badness
            warnings.warn(self._complaint(now, way), NotConverged, stacklevel=_user_stack_level())
        nothing = solution.z.new_empty(0)
        return Solution(nothing, nothing, solution.iterations, solution.residual, solution.converged, solution.finite)

    def extra_repr(self) -> str:
        o = self.options
        return f"solver={o.solver}, tol={o.tol:g}, limit={o.limit}, gradient={o.gradient}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Equilibrium":
        """Copy the layer; the copy has its own statistics and warnings, and no memory of samples."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.__dict__ = {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in ("memory", "solves")}
        new.memory, new.solves, new._warned = None, Solves(), {"forward": 0.0, "backward": 0.0}
        return new


def _options(options: Options | None, settings: dict[str, Any]) -> Options:
    if options is not None and not isinstance(options, Options):
        raise EquipoiseError(f"the options of an equilibrium layer must be an Options object, not {options!r}")
    if options is not None and settings:
        raise EquipoiseError("an equilibrium layer takes its options either as one object or one by one, not both")
    if isinstance(solver := settings.get("solver"), Solver):
        name = next(name for name, cls in SOLVERS.items() if isinstance(solver, cls))
        settings = {**settings, **solver.table(), "solver": name}
    return options or read(Options, settings, "Equilibrium")


def _warn_if_calls_differ(f: object) -> None:
    """Warn of layers with which f(z) differs between calls."""
    varying = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for layer in f.modules() if isinstance(f, nn.Module) else ():
        if isinstance(layer, varying):
            warnings.warn(
                f"f has a {type(layer).__name__}, so that f(z) differs between calls and there may be no fixed point; "
                "use GroupNorm or LayerNorm, and put dropout outside f",
                stacklevel=_user_stack_level(),
            )
            return


_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _user_stack_level() -> int:
    """Return how far up the stack, counted from the caller, the user's own code is."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    return level


def _described(name: str, way: str) -> str:
    layer = f"the equilibrium layer {name}"
    return layer if way == "forward" else f"the gradient of {layer}"


def layers(module: nn.Module) -> Iterator[tuple[str, Equilibrium]]:
    """Yield every equilibrium layer in a module with its place, which becomes its name in warnings."""
    for name, layer in module.named_modules():
        if isinstance(layer, Equilibrium):
            if name:
                layer.name = repr(name)
            yield name, layer


def set_budget(module: nn.Module, iterations: int | None) -> None:
    """Limit the iterations of all equilibrium layers in a module, forward and backward; None removes the limit."""
    whole = isinstance(iterations, int) and not isinstance(iterations, bool)
    if iterations is not None and (not whole or iterations < 1):
        raise EquipoiseError(f"a budget of {iterations!r} iterations is not allowed; it must be a whole number >= 1")
    for _, layer in layers(module):
        layer.budget = iterations
