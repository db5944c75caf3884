"""The equilibrium layer, whose output is a fixed point: z = f(z, x)."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.equilibrium.auxiliary import AuxiliaryLosses
from equipoise.equilibrium.correction import evenly_spaced
from equipoise.equilibrium.counted_solves import CountedSolves
from equipoise.equilibrium.dropout import SolveMasks
from equipoise.equilibrium.fixed_point import Solution, check_rows, computed, residuals, solve
from equipoise.equilibrium.implicit_gradient import attach, neumann, phantom
from equipoise.equilibrium.normalisation import computed_once
from equipoise.equilibrium.options import Options
from equipoise.equilibrium.pure_call import PureCall, inside_nested_jvp, inside_transform, refusing_hidden_tensors
from equipoise.equilibrium.regularisation import draw_step, jacobian_norm
from equipoise.equilibrium.reversible import Reversible, reversible
from equipoise.equilibrium.solve_stats import Solves, SolveStats
from equipoise.equilibrium.solve_warnings import warn_if_calls_differ
from equipoise.equilibrium.solvers import SOLVERS, Solver
from equipoise.equilibrium.spectrum import spectral_radius
from equipoise.equilibrium.states import State, StateLayout
from equipoise.equilibrium.transformed import transformed, unrolled
from equipoise.errors import EquipoiseError
from equipoise.settings import read

Memory = Callable[[Tensor], tuple[Tensor, Callable[[Solution], None]]]
_NOT_COPIED = ("memory", "solves", "generator", "_auxiliary")


class Equilibrium(CountedSolves):
    """A layer that solves z = f(z, x), and is differentiated without its iterations, in the memory of one call of f.

    Tensors among the inputs have one row per sample. f must treat samples independently, because samples that have
    converged are no longer part of its calls, and must be the same function in all calls of a forward pass: no
    BatchNorm, and no dropout but `VariationalDropout`. What all samples share belongs in f.

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
        super().__init__(_options(options, settings), f"of {getattr(f, '__name__', type(f).__name__)}")
        self.f, self.guess = f, guess
        if not callable(f) or isinstance(f, type):
            raise EquipoiseError(f"an equilibrium layer needs a module or a function f(z, x), not {f!r}")
        if self.options.gradient == "reversible" and self.options.damping == 1:
            raise EquipoiseError("gradient = 'reversible' needs a damping below 1: steps of full size cannot be undone")
        unsolved = self.options.gradient in ("unroll", "reversible")
        if unsolved and self.options.jacobian_weight and self.options.jacobian_at == "random-step":
            raise EquipoiseError(
                "jacobian_at = 'random-step' needs the guesses of a solver, which gradient = "
                f"'{self.options.gradient}' does not have; use jacobian_at = 'fixed-point' or another gradient"
            )
        for inner in f.modules() if isinstance(f, nn.Module) else ():
            if isinstance(inner, Equilibrium) and inner.options.jacobian_weight:
                raise EquipoiseError(
                    "an equilibrium within an equilibrium cannot have a jacobian_weight, because it would count in "
                    "every iteration of the outer one; regularise the outer one only"
                )
        self.memory: Memory | None = None
        "returns the first guess, in place of the default one, and stores what was found (see `WarmStart`)"
        self.generator: torch.Generator | None = None
        "source of random numbers; by default torch's global one"
        self._auxiliary = AuxiliaryLosses()
        warn_if_calls_differ(f)

    def forward(self, *inputs: Any, z: State | None = None) -> Any:
        """Return the fixed point for these inputs, starting at z, at the remembered point, or at the default guess."""
        return self._forward(inputs, z)[-1]

    def states(self, *inputs: Any, n: int = 3, at: Sequence[int] | None = None, z: State | None = None) -> list[Any]:
        """Return guesses on the way to the fixed point and, last, the fixed point itself, as `forward` returns it.

        Guesses have the Jacobian-free gradient, that of one step of f. See `correction_loss`.

        Args:
            inputs: the inputs, as for `forward`.
            n: number of states, evenly spaced over the iterations that the solve may take.
            at: the iterations whose results are returned, in place of `n`; 0 is one step from the first guess.
            z: the first guess, as for `forward`.
        """
        if self.options.gradient in ("unroll", "reversible"):
            raise EquipoiseError(f"states on the way need a solver; gradient = '{self.options.gradient}' has none")
        if inside_transform():
            raise EquipoiseError("states on the way do not work within transforms of torch.func")
        steps = evenly_spaced(n, self.limit) if at is None else tuple(at)
        if not all(isinstance(k, int) and k >= 0 for k in steps):
            raise EquipoiseError(f"at = {at!r} is not allowed; it must be a list of whole numbers >= 0")
        return self._forward(inputs, z, steps)

    def _forward(self, inputs: tuple[Any, ...], z: State | None, steps: tuple[int, ...] = ()) -> list[Any]:
        """Return the states after these iterations, and the result."""
        start, keep, layout = self._start(inputs, z)
        # Within a pass f is one function: masks are drawn once, and normalised weights computed once.
        with SolveMasks(self.f) as masks, computed_once(self.f):
            if inside_transform():
                self._refuse_transform(masks)
                check_rows(start, inputs)
                found = [self._transformed(PureCall(self.f, inputs, layout), start)]
            else:
                solution, found = self._found(inputs, start, layout, masks, steps)
                if keep is not None:
                    keep(solution)
        return found if layout is None else [layout.state(rows, copy=True) for rows in found]

    def _found(
        self,
        inputs: tuple[Any, ...],
        start: Tensor,
        layout: StateLayout | None,
        masks: SolveMasks,
        steps: tuple[int, ...],
    ) -> tuple[Solution, list[Tensor]]:
        """Return the solution, and the differentiable states and result; rows of numbers if there is a layout."""
        o = self.options
        f = self.f if layout is None else layout.of_rows(self.f)
        jacobian_step = self._jacobian_step(inputs)
        if o.gradient == "reversible":
            masks.refuse("gradient = 'reversible'")
            value, solution = self._reversible(PureCall(self.f, inputs, layout), start)
        elif o.gradient == "unroll" and torch.is_grad_enabled():
            value, solution = self._unroll(f, start, inputs)
        else:
            given = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
            tol, limit = self.bounds("forward")
            following, rows = masks.following(f, start)
            record = (*steps, *(jacobian_step or ()))
            solution = solve(
                following, start, [*given, *rows], solver=o.method(o.solver), tol=tol, limit=limit, record=record
            )
            value = solution.f
        self.last = self.record(solution, "forward")
        if jacobian_step is not None:
            at_step = jacobian_step and solution.guesses
            self._regularise(f, solution.guesses[-1] if at_step else solution.z, inputs)
        measurable = self.training and not torch.is_inference_mode_enabled()
        if o.spectral_radius and measurable and not self.solves.forward.measured:
            self._measure(f, solution.z, inputs)
        if o.gradient not in ("unroll", "reversible") and self._needs_gradient(inputs):
            value = self._differentiable(lambda z: f(z, *inputs), solution)
        return solution, [*(f(guess, *inputs) for guess in solution.guesses[: len(steps)]), value]

    def _differentiable(self, f: Callable[[Tensor], Tensor], solution: Solution) -> Tensor:
        """Return f at the fixed point, as a tensor that has the gradient of the options."""
        o = self.options
        if o.gradient == "phantom":
            return phantom(f, solution.z, solution.f, self.limited(o.phantom_steps), o.damping)
        adjoints = {"implicit": self._adjoint, "neumann": self._neumann}
        return attach(f, solution.z, adjoints.get(o.gradient))

    def _reversible(self, call: PureCall, start: Tensor) -> tuple[Tensor, Solution]:
        check_rows(start, [call.tensors[k] for k in range(len(call.places))])
        tol, limit = self.bounds("forward")
        needed = torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors)
        f: Callable[..., Tensor] = call
        if torch.is_grad_enabled():
            f = refusing_hidden_tensors(call, "with gradient = 'reversible'")
        run = Reversible(f, len(call.places), self.options.damping, tol, limit, self.record_undone)
        if needed:
            return reversible(run, start, call.tensors)
        solution, _ = run.run(start, tuple(call.tensors))
        return solution.f, solution

    def _transformed(self, call: PureCall, start: Tensor) -> Tensor:
        """Return the result within transforms of torch.func."""
        o = self.options
        if o.gradient == "unroll":
            return unrolled(call, start, self.limit)
        return transformed(call, start, o, self.limited(o.phantom_steps), self._solved, self._neumann)

    def _refuse_transform(self, masks: SolveMasks) -> None:
        solved = self.options.gradient != "unroll"
        refused = {
            "variational dropout": any(layer.training and layer.p > 0 for layer in masks.layers),
            "Jacobian regularisation": self.training and self.options.jacobian_weight > 0,
            "gradient = 'reversible'": self.options.gradient == "reversible",
            "a warm start": solved and self.memory is not None,
            "an equilibrium within an equilibrium": solved and sum(1 for _ in layers(self)) > 1,
            "a jvp within a jvp": solved and inside_nested_jvp(),
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
        tol, limit = self.bounds(way)
        solution = solve(f, start, solver=o.method(name), tol=tol, limit=limit)
        found = self.record(solution, way)
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

    def _needs_gradient(self, inputs: tuple[Any, ...]) -> bool:
        if not torch.is_grad_enabled():
            return False
        if not isinstance(self.f, nn.Module):
            return True  # a function may use parameters; only a module can be searched for them
        given = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return given or any(p.requires_grad for p in self.f.parameters())

    def _unroll(self, function: Callable[..., Tensor], z: Tensor, inputs: tuple[Any, ...]) -> tuple[Tensor, Solution]:
        limit = self.limited(self.options.limit)
        for _ in range(limit):
            z, before = computed(function, z, *inputs), z
        with torch.no_grad():
            found, f, d = before.detach(), z.detach(), z.shape[1:].numel()
            residual = torch.from_numpy(residuals(found.reshape(len(z), d), f.reshape(len(z), d)))
        finite = residual.isfinite()
        residual = torch.where(finite, residual, torch.inf)
        used = torch.full((len(z),), limit)
        return z, Solution(found, f, used, residual, residual <= self.options.tol, finite)

    def _adjoint(self, right_side: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        tol, limit = self.bounds("backward")
        solver = self.options.method(self.options.backward_solver or self.options.solver)
        solution = solve(right_side, v, solver=solver, tol=tol, limit=limit)
        self.last_backward = self.record(solution, "backward")
        gamma: Tensor = solution.f
        return gamma

    def _neumann(self, right_side: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        return neumann(right_side, v, self.limited(self.options.phantom_steps), self.options.damping)

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
