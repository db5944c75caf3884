"""Building blocks that several networks share."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from equipoise.equilibrium import ContractiveConv2d, project
from equipoise.settings import Count, Settings


class _Softplus(torch.autograd.Function):
    """log(1 + exp(x)), whose derivative 1 - exp(-y) is computed from the result y.

    The next layer stores y anyway, so this one needs no memory of its own; torch's version stores x.
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
    """Return log(1 + exp(x)), with less memory than torch's version."""
    value: Tensor = _Softplus.apply(x)
    return value


class Softplus(nn.Module):
    """The module of `softplus`."""

    def forward(self, x: Tensor) -> Tensor:
        return softplus(x)


Activation = Literal["softplus", "relu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"softplus": softplus, "relu": F.relu}
MODULES: dict[str, type[nn.Module]] = {"softplus": Softplus, "relu": nn.ReLU}
GROUPS = 8
"""The number of groups of every GroupNorm; numbers of channels are multiples of it."""


def conv3x3(inputs: int, outputs: int, stride: int = 1, kappa: float | None = None) -> nn.Conv2d:
    """Return a 3x3 convolution without a bias, because a normalisation follows.

    Args:
        inputs: input channels.
        outputs: output channels.
        stride: its stride, if there is no `kappa`.
        kappa: bound on its spectral norm.
    """
    if kappa is not None:
        return ContractiveConv2d(inputs, outputs, 3, kappa, padding=1, bias=False)
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def norm(channels: int) -> nn.GroupNorm:
    """Return the normalisation of all convolutional networks here."""
    return nn.GroupNorm(GROUPS, channels)


class EquilibriumBlock(nn.Module):
    """f(z, x) = GN(φ(z + GN(x + W2 * GN(φ(W1 * z))))): a residual block that gets the input x in every iteration."""

    def __init__(self, channels: int, inner: int, activation: Activation, kappa: float | None = None):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.widen, self.narrow = conv3x3(channels, inner, kappa=kappa), conv3x3(inner, channels, kappa=kappa)
        self.inner_norm, self.middle_norm, self.outer_norm = norm(inner), norm(channels), norm(channels)
        for conv in (self.widen, self.narrow):  # so small that at first x dominates, and f is a contraction
            nn.init.normal_(conv.weight, std=0.01)
        project(self)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        inner = self.inner_norm(self.activation(self.widen(z)))
        out: Tensor = self.outer_norm(self.activation(z + self.middle_norm(x + self.narrow(inner))))
        return out


class BasicBlock(nn.Module):
    """A residual block of two 3x3 convolutions (He et al., 2016)."""

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
    """Settings of the first convolution, which gives images the channels of the other layers."""

    stride: Annotated[int, Field(ge=1, le=4)] = 1
    "stride of the first convolution; 1 keeps the resolution, as in the papers, with 2 the other layers cost a quarter"


class FullyConnected(Settings):
    """Settings of FeDEQ's shared fully connected layers, which the personal head follows."""

    hidden: tuple[Count, Count] = (256, 128)
    "widths of the two hidden layers before the head"

    def fully_connected(self, width: int, activation: Activation) -> list[nn.Module]:
        """Return the layers, for inputs of this width."""
        act, (first, second) = MODULES[activation], self.hidden
        return [nn.Linear(width, first), act(), nn.Linear(first, second), act(), nn.LayerNorm(second)]
