"""Models of fully connected layers."""

from math import prod
from typing import ClassVar

from torch import nn

from equipoise.models.base import BodyAndHead, ModelSettings
from equipoise.settings import Count


class Linear(ModelSettings):
    """Linear regression: one layer that starts at zero, all of it head, so that the optimum has a closed form."""

    paper: ClassVar[str] = "the regressions of FLAME's Appendix B and of Learn2pFed's polynomials"

    bias: bool = False
    "whether there is an intercept; data may have a constant feature instead"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        head = nn.Linear(prod(shape), outputs, bias=self.bias)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        return BodyAndHead(nn.Flatten(), head)


class Softmax(ModelSettings):
    """Softmax regression: one linear layer, all of it head."""

    paper: ClassVar[str] = "the MLP of FLAME's Table II: 784 to 10, 7,850 parameters"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return BodyAndHead(nn.Flatten(), nn.Linear(prod(shape), outputs))


class MLP(ModelSettings):
    """Fully connected layers with ReLU between them; the last one is the head."""

    paper: ClassVar[str] = "784-128-64-10 as in FLAME's text: 109,386 parameters"

    hidden: tuple[Count, ...] = (128, 64)
    "widths of the hidden layers"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        width = prod(shape)
        for next_width in self.hidden:
            layers += [nn.Linear(width, next_width), nn.ReLU()]
            width = next_width
        return BodyAndHead(nn.Sequential(*layers), nn.Linear(width, outputs))
