"""Anderson acceleration: the next guess combines the last ones so that their residuals cancel best.

With differences Δr_j = r_j - r_{j-1} and Δf_j = f_j - f_{j-1} of the window, γ minimises ‖r - Σ γ_j Δr_j‖², and
z ← f - Σ γ_j Δf_j - (1 - β)(r - Σ γ_j Δr_j). This is the same rule as weights α that sum to one (FL-DEQ, Eqs. 7-8), but
keeps its accuracy when residuals are nearly equal.
"""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from equipoise.equilibrium.solvers.base import Progress, Solver, to_numpy


class Anderson(Solver):
    """Walker and Ni's method, with one small least-squares problem per sample."""

    window: Annotated[int, Field(ge=2, le=1000)] = 5
    "number of guesses that are combined, including the newest"
    ridge: Annotated[float, Field(ge=0, le=1)] = 1e-4
    "weight of the ridge in the least-squares problem, whose columns are scaled to length one"
    mixing: Annotated[float, Field(gt=0, le=1)] = 1.0
    "step size towards the combined f(z) (β)"

    def begin(self, z: Tensor) -> Progress:
        return _Anderson(self, z)


class _Anderson(Progress):
    def __init__(self, settings: Anderson, z: Tensor):
        self.settings = settings
        batch, d = z.shape
        m = settings.window - 1
        dr, df = z.new_empty(2, batch, m, d)
        # Views are created once, because for small layers a view costs as much as the arithmetic on it.
        self.slots = list(zip(dr.unbind(1), df.unbind(1), strict=True))
        self.windows = [(dr[:, :k], df[:, :k]) for k in range(m + 1)]
        self.gram = np.zeros((batch, m, m))
        # Rounding makes a nearly singular matrix indefinite, by about this much.
        self.ridge = max(settings.ridge, 10 * torch.finfo(z.dtype).eps)
        # Copies, so that memory use does not depend on whether the caller keeps the last f.
        self.last_f, self.last_r = z.new_empty(2, batch, d)
        self.seen = -1

    def next(self, z: Tensor, f: Tensor, r: Tensor, noise: np.ndarray) -> Tensor:
        m = len(self.slots)
        slot = self.seen % m
        new_dr, new_df = self.slots[slot]
        if self.seen >= 0:
            torch.sub(f, self.last_f, out=new_df)
            torch.sub(r, self.last_r, out=new_dr)
        self.last_f.copy_(f)
        self.last_r.copy_(r)
        self.seen += 1
        if self.seen == 0:
            return f if self.settings.mixing == 1 else z + self.settings.mixing * r
        k = min(self.seen, m)
        dr, df = self.windows[k]
        self.gram[:, slot, :k] = self.gram[:, :k, slot] = _products(dr, new_dr)
        found = _least_squares(self.gram[:, :k, :k], _products(dr, r), noise, self.ridge)
        gamma = torch.from_numpy(found).to(f).unsqueeze(1)
        z = torch.baddbmm(f.unsqueeze(1), gamma, df, alpha=-1)
        if (rest := 1 - self.settings.mixing) > 0:
            z -= rest * torch.baddbmm(r.unsqueeze(1), gamma, dr, alpha=-1)
        return z.squeeze(1)


def _products(rows: Tensor, vector: Tensor) -> np.ndarray:
    return to_numpy(torch.bmm(rows, vector.unsqueeze(2)))[..., 0]


def _least_squares(gram: np.ndarray, right: np.ndarray, noise: np.ndarray, ridge: float) -> np.ndarray:
    """Solve (gram + ridge) γ = right, one problem per sample; γ is 0 for columns of mere noise and for NaN."""
    length = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
    scale = np.where(length > noise[:, None], 1 / length, 0.0)
    matrix = gram * scale[:, None] * scale[:, :, None]
    diagonal = np.arange(matrix.shape[1])
    matrix[:, diagonal, diagonal] = 1 + ridge  # also for unused columns, whose γ is then zero
    b = (right * scale)[..., None]
    try:
        gamma = np.linalg.solve(matrix, b)
    except np.linalg.LinAlgError:
        matrix[:, diagonal, diagonal] += 1e-6
        gamma = np.linalg.solve(matrix, b)
    result: np.ndarray = gamma[..., 0] * scale
    return result if np.isfinite(result).all() else np.where(np.isfinite(result), result, 0)
