"""FeDEQ's models with an equilibrium layer: a fully connected one, and two sizes of a residual network."""

from abc import ABC
from collections.abc import Callable
from math import prod
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from equipoise.equilibrium import ContractiveLinear, Equilibrium, Options, spectral_norm, weight_norm
from equipoise.equilibrium.options import Gradient
from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead, ModelSettings, image_shape
from equipoise.models.blocks import (
    ACTIVATIONS,
    MODULES,
    Activation,
    Channels,
    EquilibriumBlock,
    FullyConnected,
    Stem,
    conv3x3,
    norm,
)
from equipoise.settings import Count, Settings

Kappa = Annotated[float, Field(gt=0, lt=1)]
DENSE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**ACTIVATIONS, "tanh": torch.tanh}


class EquilibriumModel(ModelSettings, Options, ABC):
    """The settings of a model with an equilibrium layer, which include those of the layer."""

    def equilibrium(self, f: nn.Module) -> Equilibrium:
        """Return an equilibrium layer of f with these settings."""
        return Equilibrium(f, Options(**{name: getattr(self, name) for name in Options.model_fields}))


class Bounded(Settings):
    """Settings that keep an equilibrium layer well posed."""

    contraction: bool = False
    "scale convolutions in f down to a spectral norm of kappa after every step; normalisations in f stay unbounded"
    kappa: Kappa = 0.95
    "bound that contraction enforces, and normalisation = spectral"
    normalisation: Literal["none", "weight", "spectral"] = "none"
    "weights in f: as they are, g v / ‖v‖ in every row, or scaled down to a spectral norm of kappa in every pass"

    @property
    def bound(self) -> float | None:
        """Return kappa, or None without contraction."""
        return self.kappa if self.contraction else None

    def normalised(self, f: nn.Module) -> nn.Module:
        """Return f with its weights normalised."""
        if self.normalisation == "none":
            return f
        if self.contraction:
            raise EquipoiseError(
                f"model.contraction = true and model.normalisation = {self.normalisation!r} both decide on the weights "
                "in f; choose one of them"
            )
        return weight_norm(f) if self.normalisation == "weight" else spectral_norm(f, self.kappa)


class FedeqModel(EquilibriumModel, ABC):
    """The settings of a model with an equilibrium layer, with FeDEQ's gradient as the default."""

    gradient: Gradient = "jacobian-free"
    "jacobian-free, as in the paper; implicit and reversible are exact; phantom, neumann lie between; unroll: for tests"


class _Dense(nn.Module):
    """f(z, u) = φ(B z + u)."""

    def __init__(self, width: int, kappa: float | None, activation: str):
        super().__init__()
        self.weight: nn.Linear = (
            nn.Linear(width, width, bias=False) if kappa is None else ContractiveLinear(width, width, kappa, bias=False)
        )
        self.activation = DENSE_ACTIVATIONS[activation]

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        return self.activation(self.weight(z) + u)


class DeqMLP(FedeqModel, Bounded):
    """A fully connected equilibrium layer z = φ(Bz + Cx + b), a hidden layer, and the head."""

    paper: ClassVar[str] = "FeDEQ's DEQ-MLP, Fig. 2: an equilibrium of width 512, then 128"

    width: Count = 512
    "width of the equilibrium"
    hidden: Count = 128
    "width of the layer before the head"
    activation: Literal["relu", "tanh", "softplus"] = "relu"
    "activation φ; all choices are non-expansive"
    contraction: bool = True
    "project the rows of B after every step, so that the absolute values of each sum to at most kappa"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(prod(shape), self.width),  # C x + b does not depend on z, so it is computed once
            self.equilibrium(self.normalised(_Dense(self.width, self.bound, self.activation))),
            *(nn.Linear(self.width, self.hidden), nn.ReLU()),
        )
        return BodyAndHead(body, nn.Linear(self.hidden, outputs))


class _DeqResNet(FedeqModel, Bounded, FullyConnected, Stem, ABC):
    name: ClassVar[str]

    channels: Channels
    inner: Channels
    activation: Activation = "softplus"
    "activation; softplus is smooth, as the theory requires"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        inputs, height, width = image_shape(shape, 4, self.name)
        channels, shrunk = self.channels, 4 * self.stride
        body = nn.Sequential(
            *(conv3x3(inputs, channels, self.stride), MODULES[self.activation](), norm(channels)),
            nn.MaxPool2d(3, 2, padding=1),
            self.equilibrium(self.normalised(EquilibriumBlock(channels, self.inner, self.activation, self.bound))),
            nn.MaxPool2d(3, 2, padding=1),
            nn.Flatten(),
            *self.fully_connected(channels * -(-height // shrunk) * -(-width // shrunk), self.activation),
        )
        return BodyAndHead(body, nn.Linear(self.hidden[-1], outputs))


class DeqResNetS(_DeqResNet):
    """A convolution, an equilibrium residual block of 64 and 128 channels, two hidden layers, and the head."""

    paper: ClassVar[str] = "FeDEQ's DEQ-ResNet-S: 984,896 shared parameters on 28x28 grey images"
    name: ClassVar[str] = "deq-resnet-s"

    channels: Channels = 64
    "channels of the images in the equilibrium layer"
    inner: Channels = 128
    "channels within the residual block"


class DeqResNetM(_DeqResNet):
    """A convolution, an equilibrium residual block of 128 and 256 channels, two hidden layers, and the head."""

    paper: ClassVar[str] = "FeDEQ's DEQ-ResNet-M: 2,725,120 shared parameters on 32x32 colour images"
    name: ClassVar[str] = "deq-resnet-m"

    channels: Channels = 128
    "channels of the images in the equilibrium layer"
    inner: Channels = 256
    "channels within the residual block"
