"""To find z with z = f(z), for every sample of a batch on its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.equilibrium.solvers import Anderson, Solver, to_numpy
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
    inputs: Sequence[Tensor] | None = None,
    *,
    solver: Solver | None = None,
    tol: float = 1e-3,
    limit: int = 20,
) -> Solution:
    """A fixed point of f, from the guess z, with at most `limit` computations of f a sample.

    With `inputs`, f is called as f(z, *inputs), each with a row a sample, and only for those samples that have not
    converged yet; without, it is always called with the whole batch. Either way a sample that has converged stays as it
    is, and no sample has a part in another's iteration.
    """
    if limit < 1:
        raise EquipoiseError(f"limit = {limit!r} is not allowed; a solve needs at least one iteration")
    with torch.no_grad(), np.errstate(all="ignore"):  # NaN is met, and told, in its place
        return _solve(f, z.detach(), inputs, solver or Anderson(), tol, limit)


def _solve(
    function: Callable[..., Tensor],
    start: Tensor,
    inputs: Sequence[Tensor] | None,
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
        rows = few.rows(at_work, working)
        if rows is None:
            f = layout.flat(function(layout.shaped(z), *(inputs or ())))
        else:
            part = function(layout.shaped(z[rows]), *few.inputs)
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


_TINY = np.finfo(np.float64).tiny


def _lengths(rows: Tensor) -> np.ndarray:
    return to_numpy(torch.linalg.vector_norm(rows, dim=1))


def _column(mask: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(mask).to(like.device).unsqueeze(1)


class _Layout:
    """Samples as rows of numbers in the order in which they lie in memory, so that neither way is a copy."""

    def __init__(self, like: Tensor):
        self.shape = like.shape[1:]
        self.is_flat = like.ndim == 2
        self.channels_last = (
            like.ndim == 4
            and like.is_contiguous(memory_format=torch.channels_last)
            and not like.is_contiguous(memory_format=torch.contiguous_format)
        )

    def flat(self, z: Tensor) -> Tensor:
        if z.shape[1:] != self.shape:
            raise EquipoiseError(
                f"an equilibrium needs f(z) of the shape of z; z has {tuple(self.shape)} a sample, "
                f"f(z) {tuple(z.shape[1:])}"
            )
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

    def __init__(self, inputs: Sequence[Tensor] | None):
        self.all, self.inputs = inputs, list(inputs or ())
        self.mask: np.ndarray | None = None
        self.index: Tensor | None = None

    def rows(self, at_work: np.ndarray, working: int) -> Tensor | None:
        """Which they are, or None where the whole batch is to be computed."""
        if not self.all or working > _FEW * len(at_work):
            return None
        if self.mask is None or not np.array_equal(self.mask, at_work):
            self.mask = at_work
            self.index = torch.from_numpy(at_work.nonzero()[0]).to(self.all[0].device)
            self.inputs = [x[self.index] for x in self.all]
        return self.index
