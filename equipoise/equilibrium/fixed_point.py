"""To find z with z = f(z), for every sample of a batch on its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.equilibrium.solvers import SOLVERS, Anderson, Solver, to_numpy
from equipoise.errors import EquipoiseError

# Below this part of the batch, f is computed for the samples still at work alone: to pick them out costs some copies.
_FEW = 0.8


@dataclass(frozen=True)
class Solution:
    """What a solve came to; `iterations`, `residual` and `converged` have one entry a sample."""

    z: Tensor
    "the guess with the smallest residual"
    f: Tensor
    "f(z), one step further"
    iterations: Tensor
    "how often f was computed for the sample"
    residual: Tensor
    "‖f(z) - z‖ / ‖f(z)‖"
    converged: Tensor
    "is the residual within the tolerance?"
    finite: Tensor
    "did f(z) stay finite?"


def solve(
    f: Callable[..., Tensor],
    z: Tensor,
    inputs: Sequence[Any] | None = None,
    *,
    solver: Solver | str | None = None,
    tol: float = 1e-3,
    limit: int = 20,
) -> Solution:
    """A fixed point of f, from the guess z, with at most `limit` computations of f a sample.

    With `inputs`, f is called as f(z, *inputs), and only for those samples that have not converged yet: every tensor
    among the inputs must have a row a sample. Without, f is always called with the whole batch. Either way a sample
    that has converged stays as it is, and no sample has a part in another's iteration.
    """
    if isinstance(inputs, Tensor):
        inputs = [inputs]
    if not isinstance(solver, Solver):
        solver = _named(solver)
    if not tol >= 0:
        raise EquipoiseError(f"tol = {tol!r} is not allowed; it must be a number >= 0")
    if not isinstance(limit, int) or limit < 1:
        raise EquipoiseError(f"limit = {limit!r} is not allowed; it must be a whole number >= 1")
    if not z.is_floating_point() or z.ndim == 0:
        raise EquipoiseError(f"the guess z has numbers with a fraction, a row a sample; not {z.dtype} {tuple(z.shape)}")
    for k, x in enumerate(inputs or ()):
        if isinstance(x, Tensor) and (x.ndim == 0 or len(x) != len(z)):
            raise EquipoiseError(
                f"input {k + 1} of an equilibrium has the shape {tuple(x.shape)}, and needs a row for each of the "
                f"{len(z)} samples; what all samples share belongs into f"
            )
    with torch.no_grad(), np.errstate(all="ignore"):  # NaN is met, and told, in its place
        return _solve(f, z.detach(), inputs, solver, tol, limit)


def _named(solver: object) -> Solver:
    if solver is None:
        return Anderson()
    if isinstance(solver, str) and solver in SOLVERS:
        return SOLVERS[solver]()
    raise EquipoiseError(
        f"solver = {solver!r} is unknown; there is {', '.join(SOLVERS)}, or an object such as Anderson()"
    )


def _solve(
    function: Callable[..., Tensor],
    start: Tensor,
    inputs: Sequence[Any] | None,
    solver: Solver,
    tol: float,
    limit: int,
) -> Solution:
    layout = _Layout(start)
    z = layout.flat(start)
    rounding = 10 * torch.finfo(z.dtype).eps
    progress = solver.begin(z)
    few = _Few(inputs)
    # One number a sample: that is quicker in numpy, and on a GPU the loop has to hear of it anyway.
    n = len(z)
    at_work, working = np.ones(n, dtype=bool), n
    finite = at_work.copy()
    iterations = np.zeros(n, dtype=np.int64)
    best_z, best_f, best = z, z, np.full(n, np.inf)
    for k in range(limit):
        rows = few.rows(at_work, working, z.device)
        if rows is None:
            f = layout.flat(_computed(function, layout.shaped(z), *(inputs or ())))
        else:
            part = _computed(function, layout.shaped(z[rows]), *few.inputs)
            f = best_f.index_copy(0, rows, layout.flat(part))
            del part
        r = f - z
        size = _lengths(f)
        residual = _lengths(r) / (size + _TINY)
        iterations += at_work
        well = np.isfinite(residual)
        better = at_work & (residual < best)
        improved = np.count_nonzero(better)
        if k == 0 or improved == n:
            best_z, best_f, best = z, f, np.where(well, residual, np.inf)
        elif improved:
            pick = _column(better, z)
            best_z, best_f = torch.where(pick, z, best_z), torch.where(pick, f, best_f)
            best = np.where(better, residual, best)
        finite &= well | ~at_work
        at_work = at_work & well & (best > tol)
        working = int(np.count_nonzero(at_work))
        if k == limit - 1 or not working:
            break
        following = progress.next(z, f, r, rounding * size)
        z = following if working == n else torch.where(_column(at_work, z), following, best_z)
        del f, r, following  # nothing but guesses is kept while f is computed, for the sake of memory
    each = (torch.from_numpy(a).to(z.device) for a in (iterations, best, best <= tol, finite))
    return Solution(layout.shaped(best_z), layout.shaped(best_f), *each)


def _computed(function: Callable[..., Tensor], z: Tensor, *inputs: Any) -> Tensor:
    before = -1 if z.is_inference() else z._version
    value = function(z, *inputs)
    if not isinstance(value, Tensor):
        raise EquipoiseError(f"an equilibrium needs f(z) to be a tensor like z, and it is a {type(value).__name__}")
    if value.shape != z.shape:
        raise EquipoiseError(
            f"an equilibrium needs f(z) of the shape of z; z has {tuple(z.shape)}, f(z) {tuple(value.shape)}; "
            "a guess of another shape than the first input is given with the call, layer(x, z=guess)"
        )
    if before >= 0 and z._version != before:
        raise EquipoiseError("f changes z in place, and an equilibrium needs it unchanged: no relu_, no z += ... in f")
    return value


def residuals(z: Tensor, f: Tensor) -> np.ndarray:
    """‖f - z‖ / ‖f‖ for rows of numbers."""
    ratio: np.ndarray = _lengths(f - z) / (_lengths(f) + _TINY)
    return ratio


_TINY = np.finfo(np.float64).tiny


def _lengths(rows: Tensor) -> np.ndarray:
    return to_numpy(torch.linalg.vector_norm(rows, dim=1))


def _column(mask: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(mask).to(like.device).unsqueeze(1)


def channels_last(x: Tensor) -> bool:
    """Do the channels of these images lie beside each other in memory?"""
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


class _Layout:
    """Samples as rows of numbers in the order in which they lie in memory, so that neither way is a copy."""

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


class _Few:
    """The samples still at work, with their inputs, once they are few."""

    def __init__(self, inputs: Sequence[Any] | None):
        self.all, self.inputs = inputs, list(inputs or ())
        self.mask: np.ndarray | None = None
        self.index: Tensor | None = None

    def rows(self, at_work: np.ndarray, working: int, device: torch.device) -> Tensor | None:
        """Which they are, or None where the whole batch is to be computed."""
        if self.all is None or working > _FEW * len(at_work):
            return None
        if self.mask is None or not np.array_equal(self.mask, at_work):
            self.mask = at_work
            self.index = torch.from_numpy(at_work.nonzero()[0]).to(device)
            self.inputs = [x[self.index] if isinstance(x, Tensor) else x for x in self.all]
        return self.index
