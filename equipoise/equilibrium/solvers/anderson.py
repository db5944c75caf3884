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
        # Copies, so that memory is the same whether or not the caller still has use for the last f.
        self.last_f, self.last_r = z.new_empty(2, batch, d)
        self.seen = -1

    def next(self, z: Tensor, f: Tensor, r: Tensor) -> Tensor:
        slot = self.seen % self.m
        if self.seen >= 0:
            torch.sub(f, self.last_f, out=self.df[:, slot])
            torch.sub(r, self.last_r, out=self.dr[:, slot])
        self.last_f.copy_(f)
        self.last_r.copy_(r)
        self.seen += 1
        if self.seen == 0:
            return f if self.settings.mixing == 1 else z + self.settings.mixing * r
        k = min(self.seen, self.m)
        dr, df = self.dr[:, :k], self.df[:, :k]
        self.gram[:, slot, :k] = self.gram[:, :k, slot] = torch.bmm(dr, dr[:, slot].unsqueeze(2)).squeeze(2)
        right = torch.bmm(dr, r.unsqueeze(2)).squeeze(2)
        gamma = _least_squares(self.gram[:, :k, :k], right, self.settings.ridge).unsqueeze(1)
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
