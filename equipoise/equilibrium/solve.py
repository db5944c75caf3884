"""To find z with z = f(z), for every sample of a batch on its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.equilibrium.solvers import Anderson, Solver
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
    with torch.no_grad():
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
    progress = solver.begin(z)
    at_work = torch.ones(len(z), dtype=torch.bool, device=z.device)
    iterations = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    finite = at_work.clone()
    best_z, best_f, best = z, z, torch.full_like(z[:, 0] if z.shape[1] else z.new_zeros(len(z)), torch.inf)
    few = _Few(inputs)
    for k in range(max(1, limit)):
        rows = few.rows(at_work)
        if rows is None:
            f = layout.flat(function(layout.shaped(z), *(inputs or ())))
        else:
            part = function(layout.shaped(z[rows]), *few.inputs)
            f = best_f.index_copy(0, rows, layout.flat(part))
            del part
        r = f - z
        iterations += at_work
        residual = r.norm(dim=1) / (f.norm(dim=1) + torch.finfo(f.dtype).tiny)
        better = at_work & (residual < best)
        if k == 0 or bool((better == at_work).all() and at_work.all()):
            best_z, best_f, best = z, f, torch.where(residual.isfinite(), residual, torch.inf)
        else:
            pick = better.unsqueeze(1)
            best_z, best_f = torch.where(pick, z, best_z), torch.where(pick, f, best_f)
            best = torch.where(better, residual, best)
        finite &= residual.isfinite() | ~at_work
        at_work = at_work & finite & (best > tol)
        if k == limit - 1 or not at_work.any():
            break
        following = progress.next(z, f, r)
        z = following if at_work.all() else torch.where(at_work.unsqueeze(1), following, best_z)
        del f, r, following  # nothing but guesses is kept while f is computed, for the sake of memory
    return Solution(layout.shaped(best_z), layout.shaped(best_f), iterations, best, best <= tol, finite)


class _Layout:
    """Samples as rows of numbers in the order in which they lie in memory, so that neither way is a copy."""

    def __init__(self, like: Tensor):
        self.shape = like.shape[1:]
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
        return (z.permute(0, 2, 3, 1) if self.channels_last else z).reshape(len(z), -1)

    def shaped(self, flat: Tensor) -> Tensor:
        if not self.channels_last:
            return flat.view(len(flat), *self.shape)
        c, h, w = self.shape
        return flat.view(len(flat), h, w, c).permute(0, 3, 1, 2)


class _Few:
    """The samples still at work, with their inputs, once they are few."""

    def __init__(self, inputs: Sequence[Tensor] | None):
        self.all, self.inputs = inputs, list(inputs or ())
        self.mask: Tensor | None = None
        self.index: Tensor | None = None

    def rows(self, at_work: Tensor) -> Tensor | None:
        """Which they are, or None where the whole batch is to be computed."""
        if self.all is None:
            return None
        if self.mask is None or not torch.equal(self.mask, at_work):
            self.mask = at_work
            index = at_work.nonzero().squeeze(1)
            self.index = index if len(index) <= _FEW * len(at_work) else None
            if self.index is not None:
                self.inputs = [x[self.index] for x in self.all]
        return self.index
