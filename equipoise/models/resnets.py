"""Residual networks: the explicit counterparts of FeDEQ's equilibrium models."""

from abc import ABC
from typing import ClassVar

from torch import nn

from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead, ModelSettings, image_shape
from equipoise.models.blocks import MODULES, Activation, BasicBlock, Channels, FullyConnected, Stem, conv3x3, norm
from equipoise.settings import Depth

_WIDTH = {3: 64, 4: 32}
"""Channels of the first group by the number of groups; every further group has twice as many."""


class _Residual(ModelSettings, Stem, ABC):
    name: ClassVar[str]
    published: ClassVar[dict[str, tuple[int, ...]]]
    "blocks per group for grey images (FEMNIST), colour ones with up to 10 classes (CIFAR-10), or more (CIFAR-100)"

    blocks: tuple[Depth, ...] | None = None
    "blocks in each of 3 or 4 groups; by default as published for this kind of images"
    width: Channels | None = None
    "channels in the first group, doubled in each further one; by default 64 for 3 groups and 32 for 4"
    activation: Activation = "relu"
    "activation after every normalisation"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        inputs, *_ = image_shape(shape, 8, self.name)
        kind = "grey" if inputs == 1 else "colour" if outputs <= 10 else "many"
        blocks = self.blocks or self.published[kind]
        if len(blocks) not in _WIDTH:
            raise EquipoiseError(f"model.blocks = {list(blocks)} is not allowed; it must be a list of 3 or 4 numbers")
        widths = [(self.width or _WIDTH[len(blocks)]) << group for group in range(len(blocks))]
        layers: list[nn.Module] = [conv3x3(inputs, widths[0], self.stride), norm(widths[0]), MODULES[self.activation]()]
        before = widths[0]
        for group, (count, channels) in enumerate(zip(blocks, widths, strict=True)):
            for k in range(count):
                layers.append(BasicBlock(before, channels, 2 if group and k == 0 else 1, self.activation))
                before = channels
        tail, before = self.tail(before)
        return BodyAndHead(
            nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *tail), nn.Linear(before, outputs)
        )

    def tail(self, width: int) -> tuple[list[nn.Module], int]:
        """Return the layers between the blocks and the head, and the width of their output."""
        return [], width


class _ResNet(_Residual, FullyConnected, ABC):
    def tail(self, width: int) -> tuple[list[nn.Module], int]:
        return self.fully_connected(width, self.activation), self.hidden[-1]


class ResNet18(_Residual):
    """Eight residual blocks, and the head right after them."""

    paper: ClassVar[str] = "He et al., 2016, with a first convolution for small images; FedReCo's Fig. 2"
    name: ClassVar[str] = "resnet-18"
    published: ClassVar[dict[str, tuple[int, ...]]] = dict.fromkeys(("grey", "colour", "many"), (2, 2, 2, 2))

    width: Channels | None = 64
    "channels in the first group, doubled in each further one"


class ResNet14(_ResNet):
    """Six residual blocks, two hidden layers, and the head."""

    paper: ClassVar[str] = "He et al., 2016, as the smallest counterpart of FeDEQ's DEQ-ResNet"
    name: ClassVar[str] = "resnet-14"
    published: ClassVar[dict[str, tuple[int, ...]]] = {"grey": (1, 2, 2, 1), "colour": (2, 2, 2), "many": (1, 2, 3)}


class ResNet20(_ResNet):
    """Nine residual blocks, two hidden layers, and the head."""

    paper: ClassVar[str] = "He et al., 2016, as FeDEQ's explicit counterpart on FEMNIST"
    name: ClassVar[str] = "resnet-20"
    published: ClassVar[dict[str, tuple[int, ...]]] = {"grey": (2, 3, 2, 2), "colour": (3, 3, 3), "many": (2, 3, 4)}


class ResNet34(_ResNet):
    """Fifteen or sixteen residual blocks, two hidden layers, and the head."""

    paper: ClassVar[str] = "He et al., 2016, as FeDEQ's explicit counterpart on CIFAR"
    name: ClassVar[str] = "resnet-34"
    published: ClassVar[dict[str, tuple[int, ...]]] = {"grey": (3, 4, 5, 3), "colour": (5, 6, 5), "many": (3, 5, 8)}
