"""Ridge regression from second moments: fits of a linear head, and the elimination of some of its coefficients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.representations.head_moments import Moments
from equipoise.torch_device import widened

CUT_OFF = 1000
"""Eigenvalues of X'X below this many rounding errors of the largest one count as zero: 2.2e-13 of it in float64."""


class Spectrum(NamedTuple):
    """The eigenvectors (columns) and eigenvalues (one per row) of X'X."""

    U: Tensor
    d: Tensor

    @classmethod
    def of(cls, xx: Tensor) -> "Spectrum":
        """Factorise X'X; where numbers are not finite the eigenvalues are NaN, so that the failure is seen."""
        bad = ~xx.isfinite().all(-1).all(-1)
        d, U = torch.linalg.eigh(widened(xx).masked_fill(bad[..., None, None], 0))
        return cls(U, d.clamp(min=0).masked_fill(bad[..., None], torch.nan).unsqueeze(-1))


def solution(xx: Tensor, xy: Tensor, penalty: Tensor | float = 0.0) -> Tensor:
    """Return the v that minimises |Xv - Y|² + penalty |v|², of minimum norm in directions that X does not see.

    Args:
        xx: X'X.
        xy: X'Y.
        penalty: not negative; its leading axes may be those of several fits to the same data.
    """
    U, d = Spectrum.of(xx)
    unseen = d <= CUT_OFF * torch.finfo(d.dtype).eps * d[..., -1:, :]  # NaN is not, and stays
    return U @ (U.mT @ xy / (d + penalty).masked_fill(unseen, torch.inf))


class Reduced(NamedTuple):
    """Moments of some coefficients, after the others have been eliminated: these take their best values for any v."""

    xx: Tensor
    xy: Tensor
    kept: list[int]
    best: Tensor
    "the best values of the others where the kept coefficients are zero"
    slope: Tensor
    "how the best values of the others fall with the kept coefficients"

    def completed(self, v: Tensor) -> Tensor:
        """Return all coefficients, in their order, from the kept ones."""
        others = self.best - self.slope @ v
        order = [*self.kept, *others_of(self.kept, len(self.kept) + others.shape[-2])]
        places = sorted(range(len(order)), key=order.__getitem__)
        return torch.cat([v, others], dim=-2)[..., places, :]


def eliminate(xx: Tensor, xy: Tensor, kept: Sequence[int]) -> Reduced:
    """Minimise |Xv - Y|² over all coefficients but the kept ones (the Schur complement of their block of X'X).

    Args:
        xx: X'X.
        xy: X'Y.
        kept: numbers of the coefficients that remain, in ascending order.
    """
    kept = list(kept)
    others = others_of(kept, xx.shape[-1])
    rows = xx[..., kept, :]
    both = torch.cat([xx[..., others, :][..., kept], xy[..., others, :]], dim=-1)
    slope, best = solution(xx[..., others, :][..., others], both).tensor_split([len(kept)], dim=-1)
    mixed = rows[..., others]
    return Reduced(rows[..., kept] - mixed @ slope, xy[..., kept, :] - mixed @ best, kept, best, slope)


def others_of(some: Sequence[int], size: int) -> list[int]:
    """Return the numbers from 0 to size - 1 that are not among these, in ascending order."""
    return sorted(set(range(size)) - set(some))


def fitted(
    m: Moments,
    penalties: Sequence[float],
    judge: Moments | None,
    *,
    bias: bool,
    towards: Tensor | None = None,
    final: Moments | None = None,
) -> Tensor:
    """Return the v that minimises |Xv - Y|² + r n |v - w|², with the r that is best on other samples.

    Args:
        m: the moments of the samples to fit, as one group.
        penalties: values of r to choose from.
        judge: the moments of the samples on which r is chosen; without samples it is the first value.
        bias: whether the last coefficient is a bias.
        towards: w; by default zero for all coefficients but a bias, which is then not penalised.
        final: the moments of the samples to fit with the r that was chosen; by default m.
    """
    r = m.n.new_tensor(penalties).reshape(-1, 1, 1)
    v = _solutions(m, r, bias, towards)
    chosen = torch.zeros(v.shape[:-3], dtype=torch.long, device=v.device)
    if judge is not None:
        errors = (v * (judge.xx @ v - 2 * judge.xy)).sum((-2, -1))  # |Xv - Y|² without |Y|², the same for all
        chosen = errors.argmin(-1)
    if final is not None:
        return _solutions(final, r.flatten()[chosen][..., None, None, None], bias, towards).squeeze(-3)
    return torch.take_along_dim(v, chosen[..., None, None, None], dim=-3).squeeze(-3)


def _solutions(m: Moments, r: Tensor, bias: bool, towards: Tensor | None) -> Tensor:
    """Return the best v for each r, whose values are along the axis of the groups."""
    inputs = m.xx.shape[-1]
    free = eliminate(m.xx, m.xy, range(inputs - bool(bias and towards is None)))
    w = torch.zeros_like(free.xy) if towards is None else widened(towards).unsqueeze(-3)
    return free.completed(w + solution(free.xx, free.xy - free.xx @ w, r * m.n.clamp(min=0)))


def packed(xx: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix as a vector, half as long."""
    rows, columns = torch.triu_indices(*xx.shape[-2:], device=xx.device)
    return xx[..., rows, columns]


def unpacked(triangle: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix with this upper triangle."""
    rows, columns = torch.triu_indices(size, size, device=triangle.device)
    xx = triangle.new_zeros((*triangle.shape[:-1], size, size))
    xx[..., rows, columns] = triangle
    xx[..., columns, rows] = triangle
    return xx
