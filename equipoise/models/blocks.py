"""Blocks that several networks are made of."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from equipoise.equilibrium import ContractiveConv2d, project
from equipoise.settings import Count, Settings


class _Softplus(torch.autograd.Function):
    """log(1 + exp(x)) whose derivative, 1 - exp(-y), comes from its result y.

    The next layer keeps y anyway, so that nothing is kept for this one; torch's own keeps x.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.softplus(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return -torch.expm1(-y) * gradient


def softplus(x: Tensor) -> Tensor:
    value: Tensor = _Softplus.apply(x)
    return value


class Softplus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return softplus(x)


Activation = Literal["softplus", "relu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"softplus": softplus, "relu": F.relu}
MODULES: dict[str, type[nn.Module]] = {"softplus": Softplus, "relu": nn.ReLU}
GROUPS = 8
"""Of every GroupNorm; numbers of channels are multiples of it."""


def conv3x3(inputs: int, outputs: int, stride: int = 1, kappa: float | None = None) -> nn.Conv2d:
    """Without a bias: a normalisation follows. With `kappa` its spectral norm is kept at or below that."""
    if kappa is not None:
        return ContractiveConv2d(inputs, outputs, 3, kappa, padding=1, bias=False)
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels)


class EquilibriumBlock(nn.Module):
    """f(z, x) = GN(φ(z + GN(x + W2 * GN(φ(W1 * z))))): a residual block, fed with the input x at every pass."""

    def __init__(self, channels: int, inner: int, activation: Activation, kappa: float | None = None):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.widen, self.narrow = conv3x3(channels, inner, kappa=kappa), conv3x3(inner, channels, kappa=kappa)
        self.inner_norm, self.middle_norm, self.outer_norm = norm(inner), norm(channels), norm(channels)
        for conv in (self.widen, self.narrow):  # so small that x rules at first, and f is a contraction
            nn.init.normal_(conv.weight, std=0.01)
        project(self)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        inner = self.inner_norm(self.activation(self.widen(z)))
        out: Tensor = self.outer_norm(self.activation(z + self.middle_norm(x + self.narrow(inner))))
        return out


class BasicBlock(nn.Module):
    """Two 3x3 convolutions that add to what is there (He et al., 2016)."""

    def __init__(self, inputs: int, channels: int, stride: int, activation: Activation):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.first, self.second = conv3x3(inputs, channels, stride), conv3x3(channels, channels)
        self.first_norm, self.second_norm = norm(channels), norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.second_norm(self.second(self.activation(self.first_norm(self.first(x)))))
        return self.activation(out + self.shortcut(x))


Channels = Annotated[int, Field(ge=GROUPS, le=4096, multiple_of=GROUPS)]


class Stem(Settings):
    """The first convolution, which brings an image to the channels of the rest."""

    stride: Annotated[int, Field(ge=1, le=4)] = 1
    "of the first convolution: 1 keeps the resolution, as in the papers; with 2 the rest costs a quarter"


class FullyConnected(Settings):
    """FeDEQ's shared fully connected part, which the personal layer follows."""

    hidden: tuple[Count, Count] = (256, 128)
    "widths of the two hidden layers before the head"

    def fully_connected(self, width: int, activation: Activation) -> list[nn.Module]:
        act, (first, second) = MODULES[activation], self.hidden
        return [nn.Linear(width, first), act(), nn.Linear(first, second), act(), nn.LayerNorm(second)]
