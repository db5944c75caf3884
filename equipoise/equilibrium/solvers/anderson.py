"""Anderson acceleration: the next guess combines the last ones so that their residuals cancel best.

With differences Δr_j = r_j - r_{j-1} and Δf_j = f_j - f_{j-1} of the window, γ minimises ‖r - Σ γ_j Δr_j‖², and
z ← f - Σ γ_j Δf_j - (1 - β)(r - Σ γ_j Δr_j). This is the same rule as weights α that sum to one (FL-DEQ, Eqs. 7-8), but
keeps its accuracy where residuals are nearly alike.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from equipoise.equilibrium.solvers.base import Progress, Solver


class Anderson(Solver):
    """Walker and Ni's method, one small least-squares problem a sample."""

    window: Annotated[int, Field(ge=2, le=1000)] = 5
    "guesses that are combined, the newest included"
    ridge: Annotated[float, Field(ge=0, le=1)] = 1e-4
    "weight of the ridge in the least-squares problem, whose columns are scaled to length one"
    mixing: Annotated[float, Field(gt=0, le=1)] = 1.0
    "β: how far towards the combined f(z) a step goes"

    def begin(self, z: Tensor) -> Progress:
        return _Anderson(self, z)


class _Anderson(Progress):
    def __init__(self, settings: Anderson, z: Tensor):
        self.settings = settings
        batch, d = z.shape
        self.m = settings.window - 1
        self.dr, self.df = z.new_empty(2, batch, self.m, d)
        self.gram = z.new_zeros(batch, self.m, self.m)
        self.last: tuple[Tensor, Tensor] | None = None
        self.seen = 0

    def next(self, z: Tensor, f: Tensor, r: Tensor) -> Tensor:
        last, self.last = self.last, (f, r)
        if last is None:
            return f if self.settings.mixing == 1 else z + self.settings.mixing * r
        slot = self.seen % self.m
        self.seen += 1
        k = min(self.seen, self.m)
        torch.sub(f, last[0], out=self.df[:, slot])
        torch.sub(r, last[1], out=self.dr[:, slot])
        dr, df = self.dr[:, :k], self.df[:, :k]
        # One pass over the window for both the new row of the Gram matrix and the right-hand side.
        products = torch.bmm(dr, torch.stack((dr[:, slot], r), dim=1).transpose(1, 2))
        self.gram[:, slot, :k] = self.gram[:, :k, slot] = products[..., 0]
        gamma = _least_squares(self.gram[:, :k, :k], products[..., 1], self.settings.ridge).unsqueeze(1)
        found = torch.baddbmm(f.unsqueeze(1), gamma, df, alpha=-1)
        if (rest := 1 - self.settings.mixing) > 0:
            found -= rest * torch.baddbmm(r.unsqueeze(1), gamma, dr, alpha=-1)
        return found.squeeze(1)


def _least_squares(gram: Tensor, right: Tensor, ridge: float) -> Tensor:
    """γ with (gram + ridge) γ = right, a problem a sample; columns that say nothing, and problems that fail, give 0."""
    length = gram.diagonal(dim1=1, dim2=2).sqrt()
    scale = torch.where(length > 0, 1 / length, 0)  # a sample that stands still has differences of length zero
    matrix = gram * scale.unsqueeze(1) * scale.unsqueeze(2)
    # Rounding makes a nearly singular matrix indefinite, and no better than by this much.
    least = 10 * torch.finfo(gram.dtype).eps
    matrix.diagonal(dim1=1, dim2=2).copy_(torch.full_like(length, 1 + max(ridge, least)))
    factor, failed = torch.linalg.cholesky_ex(matrix)
    gamma = torch.cholesky_solve((right * scale).unsqueeze(2), factor).squeeze(2) * scale
    return torch.where((failed == 0).unsqueeze(1) & gamma.isfinite(), gamma, 0)
