"""Pieces of an unrolled ADMM: a linear head as a matrix, its cells' learnables as one vector, and what cells fit to."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from equipoise.optimizers import adam
from equipoise.parameter_space import ParameterSpace, linear_head
from equipoise.state import State

SCALARS = ("rho", "eta", "theta")
"""A client's learnables beside Λ."""


@dataclass(frozen=True)
class Layout:
    """Where things lie: the head as a matrix, a row an input; and the learnables: Λ, rho, eta, theta, set by set."""

    inputs: int
    "of the head, with the constant one where it has a bias"
    outputs: int
    bias: bool
    sets: int
    "of learnables: one, or one a cell"

    @property
    def slices(self) -> dict[str, slice]:
        size = self.sets * self.inputs * self.outputs
        return {"lam": slice(0, size)} | {
            name: slice(size + k * self.sets, size + (k + 1) * self.sets) for k, name in enumerate(SCALARS)
        }

    def places(self, names: tuple[str, ...]) -> list[int]:
        """Of all learnables of these families."""
        return [k for name in names for k in range(self.slices[name].start, self.slices[name].stop)]

    def matrix(self, head: Tensor) -> Tensor:
        """From the head's vector, which is the weights, an output after the other, then the bias."""
        inputs = self.inputs - self.bias
        weight = head[..., : inputs * self.outputs].unflatten(-1, (self.outputs, inputs)).mT
        return torch.cat([weight, head[..., None, inputs * self.outputs :]], dim=-2) if self.bias else weight

    def head(self, matrix: Tensor) -> Tensor:
        """Back to the vector."""
        inputs = self.inputs - self.bias
        weight = matrix[..., :inputs, :].mT.flatten(-2)
        return torch.cat([weight, matrix[..., inputs, :]], dim=-1) if self.bias else weight

    def lam(self, raw: Tensor, k: int) -> Tensor:
        """What Λ of set k is made of, as matrices with an axis for the networks before them."""
        size = self.inputs * self.outputs
        lam: Tensor = raw[..., k * size : (k + 1) * size].unflatten(-1, (1, self.inputs, self.outputs))
        return lam

    def scalars(self, raw: Tensor, k: int) -> tuple[Tensor, ...]:
        """rho, eta and theta of set k, to be multiplied with matrices of several networks."""
        first = self.sets * self.inputs * self.outputs + k
        return raw[..., first :: self.sets].exp()[..., None, None, None].unbind(-4)

    def slope(self, k: int, lam: Tensor, scalars: Tensor) -> Tensor:
        """The learnables' gradient from those of set k; that of all others is zero."""
        size = self.inputs * self.outputs
        slope = lam.new_zeros((*scalars.shape[:-1], self.sets * (size + len(SCALARS))))
        slope[..., k * size : (k + 1) * size] = lam.flatten(-3)
        slope[..., self.sets * size + k :: self.sets] = scalars
        return slope


@lru_cache(maxsize=16)
def layout(space: ParameterSpace, sets: int) -> Layout:
    return Layout(*linear_head(space), sets)


class Fit(NamedTuple):
    """What a cell knows of a client's data: X'X = U diag(d) U', factorised once for all cells, and U'X'Y."""

    U: Tensor
    d: Tensor
    UXY: Tensor

    @classmethod
    def of(cls, xx: Tensor, xy: Tensor) -> "Fit":
        bad = ~xx.isfinite().all(-1).all(-1)  # which no factorisation takes, and which must show
        d, U = torch.linalg.eigh(xx.double().masked_fill(bad[..., None, None], 0))
        d = d.clamp(min=0).masked_fill(bad[..., None], torch.nan)
        found = (U, d.unsqueeze(-1), U.mT @ xy.double())
        return cls(*(t.to(xx.dtype) for t in found))

    def solved(self, rho: Tensor, q: Tensor) -> Tensor:
        """The smallest ½|Xv - Y|² + rho/2 |v - q|²: (X'X + rho I)⁻¹ (rho q + X'Y)."""
        return self.U @ ((rho * (self.U.mT @ q) + self.UXY) / (self.d + rho))

    def stepped(self, rho: Tensor, q: Tensor, v: Tensor, rate: float, steps: int) -> Tensor:
        """Gradient steps on the same from v, at a rate in units of one over its smoothness."""
        y, q = self.U.mT @ v, self.U.mT @ q
        step = rate / (self.d.amax(-2, keepdim=True) + rho)
        for _ in range(steps):
            y = y - step * (self.d * y - self.UXY + rho * (y - q))
        return self.U @ y


class Values(NamedTuple):
    """Λ and the scalars of a cell."""

    lam: Tensor
    rho: Tensor
    eta: Tensor
    theta: Tensor


class Adjoints(NamedTuple):
    """The derivatives of a loss by all that goes into a cell; of the scalars by their logarithms."""

    inputs: list[Tensor]
    "of alpha, v and z as they came in"
    w: Tensor
    lam: Tensor
    scalars: Tensor
    "(..., 3): of rho, eta and theta"


def closed_cell_adjoints(
    fit: Fit, values: Values, inputs: Sequence[Tensor], x_bar: Sequence[Tensor], u_bar: Tensor
) -> tuple[Tensor, Adjoints]:
    """What a cell with a closed solve sends, u, and its adjoints from those of alpha, v, z and u as they come out.

    By hand, as matrices are small and autograd's overhead is not; the letters are those of Eqs. 9 to 11.
    """
    (lam, rho, eta, theta), (alpha, v, z, w) = values, inputs
    gap = z - v + w
    alpha = alpha + theta * gap
    Uq = fit.U.mT @ (w + z + alpha)
    Uv = (rho * Uq + fit.UXY) / (fit.d + rho)
    v = fit.U @ Uv
    kappa, r = eta / (lam + eta), v - w - alpha  # z = kappa r
    u = v - kappa * r - alpha

    alpha_bar, v_bar, z_bar = x_bar
    z_bar = z_bar - u_bar
    r_bar, kappa_bar = kappa * z_bar, z_bar * r / (lam + eta)
    g = (fit.U.mT @ (v_bar + u_bar + r_bar)) / (fit.d + rho)
    q_bar = fit.U @ (rho * g)
    alpha_bar = alpha_bar - u_bar - r_bar + q_bar
    gap_bar = theta * alpha_bar
    by_scalar = [g * (Uq - Uv) * rho, kappa_bar * (1 - kappa) * eta, alpha_bar * gap * theta]
    scalars = torch.stack([t.flatten(-3).sum(-1) for t in by_scalar], dim=-1)
    lam_bar = -(kappa_bar * kappa).sum(-3, keepdim=True)
    return u, Adjoints([alpha_bar, -gap_bar, q_bar + gap_bar], q_bar - r_bar + gap_bar, lam_bar, scalars)


@dataclass(frozen=True)
class Descent:
    """Steps of learnables against their gradient, which is clipped first."""

    rule: Literal["sgd", "adam"]
    rate: float
    clip: float
    "largest norm, over all axes but those of a stack; 0: any"
    decay_after: int
    decay: float

    @staticmethod
    def memory(raw: Tensor) -> State:
        """What the rule remembers of vectors like this, and how many steps it has taken."""
        return State(first=torch.zeros_like(raw), second=torch.zeros_like(raw), age=raw.new_zeros(1))

    def __call__(self, raw: Tensor, slope: Tensor, memory: State, axes: int) -> State:
        """The new `raw`, with the new memory; the last `axes` axes are one vector."""
        if self.clip:
            norm = slope.flatten(-axes).norm(dim=-1)[(..., *[None] * axes)]
            slope = slope * (self.clip / norm.clamp(min=self.clip))
        first, second, age = memory.first, memory.second, memory.age + 1
        if self.rule == "adam":
            first, second, slope = adam(first, second, age, slope)
        rate = torch.where(age > self.decay_after, self.rate * self.decay, self.rate)
        return State(raw=raw - rate * slope, first=first, second=second, age=age)
