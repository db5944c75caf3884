"""FL-DEQ's networks: one equilibrium unit and a linear layer, and the explicit networks they are compared with."""

from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from equipoise.equilibrium import project
from equipoise.equilibrium.options import WarmStartKind
from equipoise.models.base import BodyAndHead, ModelSettings, image_shape
from equipoise.models.blocks import MODULES, Activation, BasicBlock, Channels, EquilibriumBlock, Stem, conv3x3, norm
from equipoise.models.fedeq import Bounded, EquilibriumModel
from equipoise.settings import Count, NonNegative

Layers = Annotated[int, Field(ge=2, le=10)]


class _PooledStem(Stem):
    """Settings of the layers before the unit or the blocks, which then keep the resolution."""

    pool: Annotated[int, Field(ge=1, le=4)] = 1
    "side of the squares of max pooling after the first convolution; 1 does without, as in the paper"

    def stem(self, inputs: int, channels: int, *activation: nn.Module) -> list[nn.Module]:
        """Return the first convolution, its normalisation, the activation if there is one, and the pooling."""
        pool = [nn.MaxPool2d(self.pool)] if self.pool > 1 else []
        return [conv3x3(inputs, channels, self.stride), norm(channels), *activation, *pool]


def _pooled(outputs: int, channels: int) -> tuple[list[nn.Module], nn.Linear]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()], nn.Linear(channels, outputs)


class _FlDeq(EquilibriumModel, Bounded, _PooledStem):
    """Common settings of the two equilibrium networks of FL-DEQ."""

    tol: NonNegative = 1e-2
    "tolerance; a sample has converged when ‖f(z) - z‖ is at most this times ‖f(z)‖, after about ten iterations"
    limit: Count = 10
    "largest number of iterations of a solve, forward and backward"
    warm_start: WarmStartKind = "off"
    "off, as in the paper, or start at the sample's last fixed point: of this local update, or also of earlier rounds"
    channels: Channels = 48
    "channels of the images in the unit; a multiple of 8"

    def network(self, name: str, f: nn.Module, shape: tuple[int, ...], outputs: int) -> nn.Module:
        inputs, *_ = image_shape(shape, 1, name)
        pool, head = _pooled(outputs, self.channels)
        # The input of the unit has as many channels as the unit itself, so a convolution comes first.
        stem = self.stem(inputs, self.channels)
        return BodyAndHead(nn.Sequential(*stem, self.equilibrium(self.normalised(f)), *pool), head)


class _Blocks(nn.Module):
    """Several blocks in sequence, each with the input x."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            z = block(z, x)
        return z


class DeqResidual(_FlDeq):
    """One to three residual blocks in equilibrium, and the head."""

    paper: ClassVar[str] = "FL-DEQ: one equilibrium unit of residual blocks and a linear layer"

    blocks: Annotated[int, Field(ge=1, le=3)] = 1
    "number of residual blocks in the unit"
    inner: Channels = 64
    "channels within a block; a multiple of 8"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        blocks = [EquilibriumBlock(self.channels, self.inner, "relu", self.bound) for _ in range(self.blocks)]
        return self.network("deq-residual", _Blocks(*blocks), shape, outputs)


class _Convolutions(nn.Module):
    """f(z, x) = GN(relu(x + W_L * GN(relu(... GN(relu(W_1 * z))))))."""

    def __init__(self, channels: int, layers: int, kappa: float | None):
        super().__init__()
        convs = [conv3x3(channels, channels, kappa=kappa) for _ in range(layers)]
        nn.init.normal_(convs[-1].weight, std=0.01)  # so small that at first x dominates, and f is a contraction
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(norm(channels) for _ in range(layers))
        project(self)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        last = len(self.convs) - 1
        for k, (conv, normalise) in enumerate(zip(self.convs, self.norms, strict=True)):
            z = normalise(F.relu(conv(z) + x if k == last else conv(z)))
        return z


class DeqCNN(_FlDeq):
    """Two to ten convolutions in equilibrium, and the head."""

    paper: ClassVar[str] = "FL-DEQ: one equilibrium unit of convolutions and a linear layer"

    layers: Layers = 4
    "number of convolutions in the unit"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return self.network("deq-cnn", _Convolutions(self.channels, self.layers, self.bound), shape, outputs)


class ResNet5Blocks(ModelSettings, _PooledStem):
    """A convolution, five residual blocks at full resolution, and the head."""

    paper: ClassVar[str] = "the explicit counterpart of FL-DEQ's residual blocks in equilibrium"

    channels: Channels = 64
    "channels of every convolution; a multiple of 8"
    activation: Activation = "relu"
    "activation after every normalisation"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        inputs, *_ = image_shape(shape, 1, "resnet-5-blocks")
        pool, head = _pooled(outputs, self.channels)
        blocks = [BasicBlock(self.channels, self.channels, 1, self.activation) for _ in range(5)]
        stem = self.stem(inputs, self.channels, MODULES[self.activation]())
        return BodyAndHead(nn.Sequential(*stem, *blocks, *pool), head)


class CnnL(ModelSettings, _PooledStem):
    """Two to ten convolutions at full resolution, and the head."""

    paper: ClassVar[str] = "the explicit counterparts of FL-DEQ's convolutions in equilibrium"

    layers: Layers = 10
    "number of convolutions (L)"
    channels: Channels = 48
    "channels of every convolution; a multiple of 8"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        inputs, *_ = image_shape(shape, 1, "cnn-L")
        layers = self.stem(inputs, self.channels, nn.ReLU())
        for _ in range(self.layers - 1):
            layers += [conv3x3(self.channels, self.channels), norm(self.channels), nn.ReLU()]
        pool, head = _pooled(outputs, self.channels)
        return BodyAndHead(nn.Sequential(*layers, *pool), head)
