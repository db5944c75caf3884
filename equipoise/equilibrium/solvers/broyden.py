"""Broyden's method: an estimate of the inverse Jacobian that gains one rank with every step (Broyden, 1965).

For g(z) = f(z) - z, H ≈ (∂g/∂z)⁻¹ is -I at first, which is plain iteration, and is stored as -I + Σ u_j v_jᵀ.
"""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from equipoise.equilibrium.solvers.base import Progress, Solver


class Broyden(Solver):
    """Broyden's good method with bounded memory: after `window` steps the estimate is reset."""

    window: Annotated[int, Field(ge=1, le=1000)] = 10
    "largest rank of the estimate of the inverse Jacobian"

    def begin(self, z: Tensor) -> Progress:
        return _Broyden(self.window, z)


class _Broyden(Progress):
    def __init__(self, window: int, z: Tensor):
        self.window = window
        self.u, self.v = z.new_empty(2, len(z), window, z.shape[1])
        # Copies, so that memory use does not depend on whether the caller keeps the last z.
        self.last_z, self.last_r = z.new_empty(2, *z.shape)
        self.ranks = -1

    def next(self, z: Tensor, f: Tensor, r: Tensor, noise: np.ndarray) -> Tensor:
        if 0 <= self.ranks < self.window:
            s, y = torch.sub(z, self.last_z, out=self.last_z), torch.sub(r, self.last_r, out=self.last_r)
            self._learn(s, y, torch.from_numpy(noise).to(r).unsqueeze(1))
        else:  # nothing to learn from yet, or no room
            self.ranks = 0
        self.last_z.copy_(z)
        self.last_r.copy_(r)
        return self._times(r).neg_().add_(z)

    def _learn(self, s: Tensor, y: Tensor, noise: Tensor) -> None:
        """Add (s - H y) sᵀH / (sᵀH y) to H, so that H y = s; skip samples where y is mere noise."""
        u, v = self.u[:, : self.ranks], self.v[:, : self.ranks]
        v_new = torch.baddbmm(s.unsqueeze(1), torch.bmm(s.unsqueeze(1), u.transpose(1, 2)), v, beta=-1).squeeze(1)
        bottom = (v_new * y).sum(1, keepdim=True)
        u_new = self._times(y).neg_().add_(s)
        length = y.norm(dim=1, keepdim=True)
        safe = bottom.abs() > torch.finfo(s.dtype).eps * v_new.norm(dim=1, keepdim=True) * length
        safe &= length > noise
        self.u[:, self.ranks] = u_new.mul_(torch.where(safe, 1 / bottom, 0))
        self.v[:, self.ranks] = v_new
        self.ranks += 1

    def _times(self, x: Tensor) -> Tensor:
        """Return H x."""
        u, v = self.u[:, : self.ranks], self.v[:, : self.ranks]
        if not self.ranks:
            return -x
        weights = torch.bmm(x.unsqueeze(1), v.transpose(1, 2))
        return torch.baddbmm(x.unsqueeze(1), weights, u, beta=-1).squeeze(1)
