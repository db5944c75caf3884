"""What keeps an equilibrium well posed: weights that are brought back, after every step, to where f is a contraction.

Dense: z = φ(Bz + u) with φ component-wise non-expansive has one fixed point wherever ‖B‖_∞ ≤ κ < 1 (FeDEQ, Section
3.2), and ‖B‖_∞ is the largest sum of absolute values in a row: rows are projected onto the ℓ1 ball of radius κ. The set
is convex, so that a mean of clients' matrices is in it too. Convolutions: the weights are scaled down until a bound on
the operator's spectral norm is κ.
"""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import EquipoiseError

_HUGE = 1e30  # times this, whatever is above zero is above one


@torch.no_grad()
def project_rows(matrix: Tensor, radius: float) -> Tensor:
    """The nearest matrix whose rows have absolute values that sum to at most `radius`, a number >= 0.

    Every entry of a row comes nearer to zero by the same threshold, and stops there. The threshold is solved for as if
    those that are left would all stay, and again when some of them have stopped, until none stops any more (Michelot,
    1986). That is exact, and takes a few passes over the rows; to sort them takes longer (benchmarks/equilibrium.py).
    """
    size = matrix.abs()
    threshold = ((size.sum(-1, keepdim=True) - radius) / matrix.shape[-1]).clamp_(min=0)
    rest, left = torch.empty_like(size), torch.full_like(threshold, torch.inf)
    while True:
        torch.sub(size, threshold, out=rest).clamp_(min=0)
        before, left = left, (rest * _HUGE).clamp_(max=1).sum(-1, keepdim=True)  # entries that are above zero
        if not (left < before).any():
            return torch.copysign(rest, matrix)
        threshold += ((rest.sum(-1, keepdim=True) - radius) / left.clamp(min=1)).clamp_(min=0)


@torch.no_grad()
def conv_norm_bound(weight: Tensor) -> Tensor:
    """A bound on the spectral norm of a convolution of stride 1, whatever the size of its images.

    √(hw) times the smallest spectral norm of the kernel's four foldings into a matrix (Singla and Feizi, 2021).
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
        return largest  # nothing at all, or nothing that could be bounded
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
        # To begin with, rows are scaled rather than projected, which would set most of their entries to zero.
        size = self.weight.data.abs().sum(1, keepdim=True)
        self.weight.data.mul_((self.kappa / size).clamp(max=1))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kappa={self.kappa:g}"

    def project_(self) -> None:
        self.weight.data.copy_(project_rows(self.weight.data, self.kappa))


class ContractiveConv2d(nn.Conv2d):
    """A convolution of stride 1 with spectral norm ≤ kappa, if `project_` is called after every step."""

    def __init__(self, inputs: int, outputs: int, kernel: int, kappa: float = 0.95, **kwargs: Any):
        super().__init__(inputs, outputs, kernel, **kwargs)
        if self.stride != (1, 1) or self.groups != 1 or self.padding_mode != "zeros":
            raise EquipoiseError("a contractive convolution has stride 1, one group and zeros around the image")
        self.kappa = _checked(kappa)
        self.project_()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kappa={self.kappa:g}"

    def project_(self) -> None:
        self.weight.data.mul_((self.kappa / conv_norm_bound(self.weight.data)).clamp(max=1))


@torch.no_grad()
def project(module: nn.Module) -> None:
    """Bring the weights of every layer that has a `project_` back to where they are allowed to be."""
    for layer in projected(module):
        layer.project_()


def projected(module: nn.Module) -> list[Any]:
    return [layer for layer in module.modules() if callable(getattr(layer, "project_", None))]
