"""Layers that keep an equilibrium well posed: after every step, their weights are projected so that f is a contraction.

Dense: z = φ(Bz + u) with φ component-wise non-expansive has exactly one fixed point if ‖B‖_∞ ≤ κ < 1 (FeDEQ, Section
3.2). ‖B‖_∞ is the largest sum of absolute values in a row, so rows are projected onto the ℓ1 ball of radius κ. The set
is convex, so a mean of clients' matrices is in it too. Convolutions: the weights are scaled down until a bound on the
operator's spectral norm is κ.
"""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import EquipoiseError

_HUGE = 1e30  # times this, every positive number is above one


@torch.no_grad()
def project_rows(matrix: Tensor, radius: float) -> Tensor:
    """Return the nearest matrix in which the absolute values of each row sum to at most `radius`, a number >= 0.

    Every entry of a row moves towards zero by the same threshold, and stops at zero. The threshold is computed as if
    no other entry would reach zero, and computed again when some do, until none does any more (Michelot, 1986). This is
    exact, and takes a few passes over the rows; sorting them takes longer (benchmarks/equilibrium.py).
    """
    size = matrix.abs()
    threshold = ((size.sum(-1, keepdim=True) - radius) / matrix.shape[-1]).clamp_(min=0)
    rest, left = torch.empty_like(size), torch.full_like(threshold, torch.inf)
    while True:
        torch.sub(size, threshold, out=rest).clamp_(min=0)
        before, left = left, (rest * _HUGE).clamp_(max=1).sum(-1, keepdim=True)  # number of entries above zero
        if not (left < before).any():
            return torch.copysign(rest, matrix)
        threshold += ((rest.sum(-1, keepdim=True) - radius) / left.clamp(min=1)).clamp_(min=0)


@torch.no_grad()
def conv_norm_bound(weight: Tensor) -> Tensor:
    """Return a bound on the spectral norm of a convolution of stride 1, for images of any size.

    It is √(hw) times the smallest spectral norm of the kernel's four foldings into a matrix (Singla and Feizi, 2021).
    """
    o, i, h, w = weight.shape
    foldings = (
        weight.reshape(o, i * h * w),
        weight.transpose(0, 1).reshape(i, o * h * w),
        weight.permute(0, 2, 1, 3).reshape(o * h, i * w),
        weight.permute(0, 3, 1, 2).reshape(o * w, i * h),
    )
    largest = weight.abs().max()
    if not 0 < largest < torch.inf:
        return largest  # zero, or not finite
    norm = torch.stack([_spectral_norm(matrix / largest) for matrix in foldings]).min()
    bound: Tensor = norm * largest * (h * w) ** 0.5
    return bound


def _spectral_norm(matrix: Tensor) -> Tensor:
    gram = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
    norm: Tensor = torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt()
    return norm


def _checked(kappa: float) -> float:
    if not isinstance(kappa, (int, float)) or not 0 < kappa < 1:
        raise EquipoiseError(f"kappa = {kappa!r} is not allowed; it must be a number > 0 and < 1")
    return kappa


class ContractiveLinear(nn.Linear):
    """A linear layer with ‖W‖_∞ ≤ kappa, if `project_` is called after every step (`project` does so for a model)."""

    def __init__(self, inputs: int, outputs: int, kappa: float = 0.95, **kwargs: Any):
        super().__init__(inputs, outputs, **kwargs)
        self.kappa = _checked(kappa)
        # Initially rows are scaled, because projecting them would set most of their entries to zero.
        size = self.weight.data.abs().sum(1, keepdim=True)
        self.weight.data.mul_((self.kappa / size).clamp(max=1))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kappa={self.kappa:g}"

    def project_(self) -> None:
        """Project the rows of the weights in place."""
        self.weight.data.copy_(project_rows(self.weight.data, self.kappa))


class ContractiveConv2d(nn.Conv2d):
    """A convolution of stride 1 with spectral norm ≤ kappa, if `project_` is called after every step."""

    def __init__(self, inputs: int, outputs: int, kernel: int, kappa: float = 0.95, **kwargs: Any):
        super().__init__(inputs, outputs, kernel, **kwargs)
        if self.stride != (1, 1) or self.groups != 1 or self.padding_mode != "zeros":
            raise EquipoiseError("a contractive convolution must have stride 1, one group and padding with zeros")
        self.kappa = _checked(kappa)
        self.project_()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kappa={self.kappa:g}"

    def project_(self) -> None:
        """Scale the weights down in place, if needed."""
        self.weight.data.mul_((self.kappa / conv_norm_bound(self.weight.data)).clamp(max=1))


@torch.no_grad()
def project(module: nn.Module) -> None:
    """Call `project_` on every layer that has it."""
    for layer in projected(module):
        layer.project_()


def projected(module: nn.Module) -> list[Any]:
    """Return the layers of a module that have a `project_` method."""
    return [layer for layer in module.modules() if callable(getattr(layer, "project_", None))]
