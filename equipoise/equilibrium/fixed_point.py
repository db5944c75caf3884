"""The search for z = f(z), for every sample of a batch separately."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.equilibrium.pure_call import inside_transform, of_transform
from equipoise.equilibrium.solvers import SOLVERS, Anderson, Solver, to_numpy
from equipoise.equilibrium.states import State, StateLayout
from equipoise.errors import EquipoiseError

# Below this share of the batch, f is computed for the active samples only. Above it, selecting them costs too much.
_SELECT_BELOW = 0.8


@dataclass(frozen=True)
class Solution:
    """The result of a solve; `iterations`, `residual`, `converged` and `finite` have one entry per sample."""

    z: State
    "the guess with the smallest residual"
    f: State
    "f(z), one step further"
    iterations: Tensor
    "number of evaluations of f for the sample"
    residual: Tensor
    "‖f(z) - z‖ / ‖f(z)‖"
    converged: Tensor
    "whether the residual is within the tolerance"
    finite: Tensor
    "whether f(z) stayed finite"
    guesses: tuple[Tensor, ...] = ()
    "the guesses of the iterations to record"


def solve(
    f: Callable[..., State],
    z: State,
    inputs: Sequence[Any] | None = None,
    *,
    solver: Solver | str | None = None,
    tol: float = 1e-3,
    limit: int = 20,
    record: Sequence[int] = (),
) -> Solution:
    """Find a fixed point of f for every sample of a batch.

    A sample that has converged does not change any more, and samples do not influence each other.

    Args:
        f: the function of z, or of z and the inputs.
        z: the first guess, one row per sample: a tensor, or a tuple, list or dictionary of tensors.
        inputs: further arguments of f; every tensor among them has one row per sample. With them, f is called as
            f(z, *inputs), and only for samples that have not converged. Without, it gets the whole batch every time.
        solver: the solver or its name; by default Anderson().
        tol: a sample has converged when ‖f(z) - z‖ is at most this times ‖f(z)‖.
        limit: largest number of evaluations of f per sample.
        record: iterations, counted from 0, whose guesses are returned as well; the guess of a sample that is done is
            the one that it ended with.
    """
    if isinstance(inputs, Tensor):
        inputs = [inputs]
    if not isinstance(solver, Solver):
        solver = _named(solver)
    if not tol >= 0:
        raise EquipoiseError(f"tol = {tol!r} is not allowed; it must be a number >= 0")
    if not isinstance(limit, int) or limit < 1:
        raise EquipoiseError(f"limit = {limit!r} is not allowed; it must be a whole number >= 1")
    if not isinstance(z, Tensor):
        layout = StateLayout(z)
        flat = solve(layout.of_rows(f), layout.rows(z, "z"), inputs, solver=solver, tol=tol, limit=limit, record=record)
        guesses = tuple(map(layout.state, flat.guesses))
        return replace(flat, z=layout.state(flat.z), f=layout.state(flat.f), guesses=guesses)
    if inside_transform() and any(map(of_transform, (z, *(inputs or ())))):
        raise EquipoiseError("solve does not work within transforms of torch.func; an Equilibrium layer does")
    check_rows(z, inputs or ())
    with torch.no_grad(), np.errstate(all="ignore"):  # NaN is detected and reported later
        return _solve(f, z.detach(), inputs, solver, tol, limit, record)


def check_rows(z: Tensor, inputs: Sequence[Any]) -> None:
    """Refuse a guess or inputs that do not have one row per sample."""
    if not z.is_floating_point() or z.ndim == 0:
        raise EquipoiseError(
            "the guess z must be a floating-point tensor with one row per sample, "
            f"not {z.dtype} of shape {tuple(z.shape)}"
        )
    for k, x in enumerate(inputs):
        if isinstance(x, Tensor) and (x.ndim == 0 or len(x) != len(z)):
            raise EquipoiseError(
                f"input {k + 1} of an equilibrium has shape {tuple(x.shape)}, but needs one row for each of the "
                f"{len(z)} samples; what all samples share belongs in f"
            )


def _named(solver: object) -> Solver:
    if solver is None:
        return Anderson()
    if isinstance(solver, str) and solver in SOLVERS:
        return SOLVERS[solver]()
    raise EquipoiseError(
        f"solver = {solver!r} is unknown; available: {', '.join(SOLVERS)}, or an object such as Anderson()"
    )


def _solve(
    function: Callable[..., Tensor],
    start: Tensor,
    inputs: Sequence[Any] | None,
    solver: Solver,
    tol: float,
    limit: int,
    record: Sequence[int],
) -> Solution:
    layout = _Layout(start)
    z = layout.flat(start)
    rounding = 10 * torch.finfo(z.dtype).eps
    progress = solver.begin(z)
    selection = _ActiveSamples(inputs)
    # One number per sample: numpy is faster here, and with a GPU the loop needs these numbers on the CPU anyway.
    n = len(z)
    active, remaining = np.ones(n, dtype=bool), n
    finite = active.copy()
    iterations = np.zeros(n, dtype=np.int64)
    best_z, best_f, best = z, z, np.full(n, np.inf)
    recorded: dict[int, Tensor] = {}
    for k in range(limit):
        if k in record:
            recorded[k] = z
        rows = selection.rows(active, remaining, z.device)
        if rows is None:
            f = layout.flat(computed(function, layout.shaped(z), *(inputs or ())))
        else:
            part = computed(function, layout.shaped(z[rows]), *selection.inputs)
            f = best_f.index_copy(0, rows, layout.flat(part))
            del part
        r = f - z
        size = _lengths(f)
        residual = _lengths(r) / (size + _TINY)
        iterations += active
        well = np.isfinite(residual)
        better = active & (residual < best)
        improved = np.count_nonzero(better)
        if k == 0 or improved == n:
            best_z, best_f, best = z, f, np.where(well, residual, np.inf)
        elif improved:
            pick = _column(better, z)
            best_z, best_f = torch.where(pick, z, best_z), torch.where(pick, f, best_f)
            best = np.where(better, residual, best)
        finite &= well | ~active
        active = active & well & (best > tol)
        remaining = int(np.count_nonzero(active))
        if k == limit - 1 or not remaining:
            break
        following = progress.next(z, f, r, rounding * size)
        z = following if remaining == n else torch.where(_column(active, z), following, best_z)
        del f, r, following  # to save memory, only guesses are kept while f is computed
    used, reached, converged, stayed_finite = (
        torch.from_numpy(a).to(z.device) for a in (iterations, best, best <= tol, finite)
    )
    guesses = tuple(layout.shaped(recorded.get(k, best_z)) for k in record)
    return Solution(layout.shaped(best_z), layout.shaped(best_f), used, reached, converged, stayed_finite, guesses)


def computed(function: Callable[..., Tensor], z: Tensor, *inputs: Any) -> Tensor:
    """Return f(z), and refuse an f that returns something else than a state or changes z in place."""
    before = -1 if z.is_inference() else z._version
    value = function(z, *inputs)
    if not isinstance(value, Tensor):
        raise EquipoiseError(f"f(z) must be a tensor of the shape of z, but it is a {type(value).__name__}")
    if value.shape != z.shape:
        raise EquipoiseError(_wrong_shape(z, value))
    if before >= 0 and z._version != before:
        raise EquipoiseError("f changes z in place, which is not allowed in an equilibrium: no relu_, no z += ... in f")
    return value


def _wrong_shape(z: Tensor, value: Tensor) -> str:
    return (
        f"f(z) must have the shape of z; z has {tuple(z.shape)}, f(z) has {tuple(value.shape)}; "
        "if z has another shape than the first input, give a guess: layer(x, z=guess)"
    )


def residuals(z: Tensor, f: Tensor) -> np.ndarray:
    """Return ‖f - z‖ / ‖f‖ of each row."""
    ratio: np.ndarray = _lengths(f - z) / (_lengths(f) + _TINY)
    return ratio


_TINY = np.finfo(np.float64).tiny


def _lengths(rows: Tensor) -> np.ndarray:
    return to_numpy(torch.linalg.vector_norm(rows, dim=1))


def _column(mask: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(mask).to(like.device).unsqueeze(1)


def channels_last(x: Tensor) -> bool:
    """Tell whether images have their channels last in memory."""
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


class _Layout:
    """Converts samples to rows of numbers and back, in their order in memory, so that nothing is copied."""

    def __init__(self, like: Tensor):
        self.shape = like.shape[1:]
        self.is_flat = like.ndim == 2
        self.channels_last = channels_last(like)

    def flat(self, z: Tensor) -> Tensor:
        if self.is_flat:
            return z
        return (z.permute(0, 2, 3, 1) if self.channels_last else z).reshape(len(z), self.shape.numel())

    def shaped(self, flat: Tensor) -> Tensor:
        if self.is_flat:
            return flat
        if not self.channels_last:
            return flat.view(len(flat), *self.shape)
        c, h, w = self.shape
        return flat.view(len(flat), h, w, c).permute(0, 3, 1, 2)


class _ActiveSamples:
    """The active samples, with their inputs, once they are selection."""

    def __init__(self, inputs: Sequence[Any] | None):
        self.all, self.inputs = inputs, list(inputs or ())
        self.mask: np.ndarray | None = None
        self.index: Tensor | None = None

    def rows(self, active: np.ndarray, remaining: int, device: torch.device) -> Tensor | None:
        """Return their indices, or None if f is to be computed for the whole batch."""
        if self.all is None or remaining > _SELECT_BELOW * len(active):
            return None
        if self.mask is None or not np.array_equal(self.mask, active):
            self.mask = active
            self.index = torch.from_numpy(active.nonzero()[0]).to(device)
            self.inputs = [x[self.index] if isinstance(x, Tensor) else x for x in self.all]
        return self.index
