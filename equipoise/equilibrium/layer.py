"""The equilibrium layer, whose output is a fixed point: z = f(z, x)."""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.equilibrium.auxiliary import AuxiliaryLosses
from equipoise.equilibrium.correction import evenly_spaced
from equipoise.equilibrium.dropout import SolveMasks
from equipoise.equilibrium.fixed_point import Solution, residuals, solve
from equipoise.equilibrium.implicit_gradient import attach
from equipoise.equilibrium.normalisation import computed_once
from equipoise.equilibrium.options import Options
from equipoise.equilibrium.regularisation import draw_step, jacobian_norm
from equipoise.equilibrium.solve_stats import NotConverged, Solves, SolveStats
from equipoise.equilibrium.solvers import SOLVERS, Solver
from equipoise.equilibrium.spectrum import spectral_radius
from equipoise.errors import EquipoiseError
from equipoise.settings import read

Memory = Callable[[Tensor], tuple[Tensor, Callable[[Solution], None]]]
_NOT_COPIED = ("memory", "solves", "generator", "_auxiliary")


class Equilibrium(nn.Module):
    """A layer that solves z = f(z, x), and is differentiated without its iterations, in the memory of one call of f.

    Tensors among the inputs have one row per sample. f must treat samples independently, because samples that have
    converged are no longer part of its calls, and must be the same function in all calls of a forward pass: no
    BatchNorm, and no dropout but `VariationalDropout`. What all samples share belongs in f.

    The result is f(z, x) at the z that was found, in training and in prediction. Only with gradient = "unroll" does
    training apply f `limit` times, while prediction solves. z has the shape of the first input, unless the call gives a
    guess.
    """

    def __init__(self, f: Callable[..., Tensor], options: Options | None = None, **settings: Any):
        """Create the layer.

        Args:
            f: a module or function of (z, x, ...).
            options: how it is solved and differentiated.
            settings: the same as single settings of `Options`; `solver` may also be an object such as
                Anderson(window=8).
        """
        super().__init__()
        self.f, self.options = f, _options(options, settings)
        if not callable(f) or isinstance(f, type):
            raise EquipoiseError(f"an equilibrium layer needs a module or a function f(z, x), not {f!r}")
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
        self.generator: torch.Generator | None = None
        "source of random numbers; by default torch's global one"
        self._auxiliary = AuxiliaryLosses()
        self._warned = {"forward": 0.0, "backward": 0.0}
        _warn_if_calls_differ(f)

    @property
    def tally(self) -> SolveStats:
        """Return the statistics of all forward solves."""
        return self.solves.forward

    def forward(self, *inputs: Any, z: Tensor | None = None) -> Tensor:
        """Return the fixed point for these inputs, starting at z, at the remembered point, or at the default guess."""
        # Within a pass f is one function: masks are drawn once, and normalised weights computed once.
        with SolveMasks(self.f) as masks, computed_once(self.f):
            return self._forward(inputs, z, masks)

    def states(
        self, *inputs: Any, n: int = 3, at: Sequence[int] | None = None, z: Tensor | None = None
    ) -> list[Tensor]:
        """Return guesses on the way to the fixed point and, last, the fixed point itself, as `forward` returns it.

        Guesses have the Jacobian-free gradient, that of one step of f. See `correction_loss`.

        Args:
            inputs: the inputs, as for `forward`.
            n: number of states, evenly spaced over the iterations that the solve may take.
            at: the iterations whose results are returned, in place of `n`; 0 is one step from the first guess.
            z: the first guess, as for `forward`.
        """
        if self.options.gradient == "unroll":
            raise EquipoiseError("states on the way need a solve; gradient = 'unroll' has none in training")
        steps = evenly_spaced(n, self.limit) if at is None else tuple(at)
        if not all(isinstance(k, int) and k >= 0 for k in steps):
            raise EquipoiseError(f"at = {at!r} is not allowed; it must be a list of whole numbers >= 0")
        states: list[Tensor] = []
        with SolveMasks(self.f) as masks, computed_once(self.f):
            last = self._forward(inputs, z, masks, steps, states)
        return [*states, last]

    def _forward(
        self,
        inputs: tuple[Any, ...],
        z: Tensor | None,
        masks: SolveMasks,
        steps: tuple[int, ...] = (),
        states: list[Tensor] | None = None,
    ) -> Tensor:
        start, keep = self._start(inputs, z)
        step = self._jacobian_step(inputs)
        if self.options.gradient == "unroll" and torch.is_grad_enabled():
            value, solution = self._unroll(start, inputs)
        else:
            given = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
            tol, limit = self._bounds("forward")
            solver = self.options.method(self.options.solver)
            f, rows = masks.following(self.f, start)
            record = (*steps, *(step or ()))
            solution = solve(f, start, [*given, *rows], solver=solver, tol=tol, limit=limit, record=record)
            value = solution.f
        self.last = self._record(solution, "forward")
        if keep is not None:
            keep(solution)
        if states is not None:
            states += [self.f(guess, *inputs) for guess in solution.guesses[: len(steps)]]
        if step is not None:
            self._regularise(self.f, solution.guesses[-1] if step and solution.guesses else solution.z, inputs)
        if self.options.spectral_radius and self.training and not self.solves.forward.measured:
            self._measure(self.f, solution.z, inputs)
        if self.options.gradient == "unroll" or not self._needs_gradient(inputs):
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
                raise EquipoiseError(
                    f"the first input of an equilibrium layer must be a floating-point tensor, not {what}"
                )
            default = torch.zeros_like(x) if self.options.start == "zero" else x
        if self.memory is None:
            return default.detach(), None
        remembered, keep = self.memory(default.detach())
        return (remembered if z is None else z.detach()), keep

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

    def _unroll(self, z: Tensor, inputs: tuple[Any, ...]) -> tuple[Tensor, Solution]:
        limit = self._limit(self.options.limit)
        for _ in range(limit):
            z, before = self.f(z, *inputs), z
            if z.shape != before.shape:
                raise EquipoiseError(
                    f"f(z) must have the shape of z; z has {tuple(before.shape)}, f(z) has {tuple(z.shape)}"
                )
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
        return solution.f

    @property
    def draws(self) -> bool:
        """Tell whether the layer draws random numbers in training."""
        return self.options.jacobian_weight > 0

    def _jacobian_step(self, inputs: tuple[Any, ...]) -> tuple[int, ...] | None:
        if not (self.training and self.options.jacobian_weight and self._needs_gradient(inputs)):
            return None
        return draw_step(self.options, self.limit, self.generator)

    def _regularise(self, f: Callable[..., Tensor], z: Tensor, inputs: tuple[Any, ...]) -> None:
        o = self.options
        size = jacobian_norm(f, z, *inputs, probes=o.jacobian_probes, generator=self.generator)
        self._auxiliary.add(o.jacobian_weight * size)

    def _measure(self, f: Callable[..., Tensor], z: Tensor, inputs: tuple[Any, ...]) -> None:
        """Measure the spectral radius; with random numbers of its own, so that training is the same without it."""
        found = spectral_radius(f, z, *inputs, generator=torch.Generator().manual_seed(0))
        found = found[found.isfinite()].double()
        self.solves.forward.add(SolveStats(measured=len(found), radius=float(found.sum())))

    def auxiliary_loss(self) -> Tensor | None:
        """Return the weighted ‖J‖_F² / d of the calls since this was last called, or None if there were none."""
        return self._auxiliary.take()

    def complaints(self, solves: Solves) -> list[tuple[float, str]]:
        """Return the problems of these solves, each as the share of solves that failed and a sentence."""
        found = []
        for way, tally in (("forward", solves.forward), ("backward", solves.backward)):
            if tally.unconverged:
                found.append((tally.failed, tally.complaint(_described(self.name, way), *self._bounds(way))))
        return found

    def _bounds(self, way: str) -> tuple[float, int]:
        """Return the tolerance and the iteration limit of a solve."""
        o = self.options
        if way == "forward":
            return o.tol, self._limit(o.limit)
        return (o.tol if o.backward_tol is None else o.backward_tol), self._limit(o.backward_limit or o.limit)

    def _record(self, solution: Solution, way: str) -> Solution:
        """Count a solve, warn if it failed, and return it without its values."""
        own = self.options.limit if way == "forward" else self.options.backward_limit or self.options.limit
        now = SolveStats.of(solution, self.budget is not None and self.budget < own)
        getattr(self.solves, way).add(now)
        badness = torch.inf if now.diverged else now.residual
        # Warn once, and again only when it has become much worse.
        if now.unconverged and not self.quiet and badness > 10 * self._warned[way]:
            self._warned[way] = badness
            text = now.complaint(_described(self.name, way), *self._bounds(way))
            warnings.warn(text, NotConverged, stacklevel=_user_stack_level())
        nothing = solution.z.new_empty(0)
        return Solution(nothing, nothing, solution.iterations, solution.residual, solution.converged, solution.finite)

    def extra_repr(self) -> str:
        o = self.options
        return f"solver={o.solver}, tol={o.tol:g}, limit={o.limit}, gradient={o.gradient}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Equilibrium":
        """Copy the layer; the copy has its own statistics and warnings, and no memory of samples."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.__dict__ = {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in _NOT_COPIED}
        new.memory, new.solves, new._warned = None, Solves(), {"forward": 0.0, "backward": 0.0}
        new.generator, new._auxiliary = None, AuxiliaryLosses()
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
                "use GroupNorm or LayerNorm, and VariationalDropout",
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
