"""Networks whose representation is random: a normal distribution for every sample, from which one is drawn."""

from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.models.base import BodyAndHead
from equipoise.models.convolutional import LeNet
from equipoise.models.dense import MLP
from equipoise.settings import Count

ENCODER = "body.encoder"
"""The submodule whose outputs are the means and, through `normal`, the spreads."""


def normal(encoded: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations from what the encoder gives."""
    mean, spread = encoded.chunk(2, dim=-1)
    return mean, nn.functional.softplus(spread)


class Draw(nn.Module):
    """A draw from the distribution in training; its mean otherwise, of which a linear head gives the mean answer."""

    draws: ClassVar[bool] = True
    generator: torch.Generator | None = None
    "where random numbers come from, if not from torch's own stream"

    def forward(self, encoded: Tensor) -> Tensor:
        mean, sd = normal(encoded)
        if not self.training:
            return mean
        noise = torch.empty_like(mean).normal_(generator=self.generator)
        return mean + sd * noise


def _random(module: Any, latent: int, outputs: int) -> nn.Module:
    """A network with a normal distribution between its body and its head."""
    encoder = nn.Linear(module.head.in_features, 2 * latent)
    body = nn.Sequential(OrderedDict(features=module.body, encoder=encoder, draw=Draw()))
    return BodyAndHead(body, nn.Linear(latent, outputs))


class GaussianLeNet(LeNet):
    """LeNet-5 whose last hidden layer gives a normal distribution, from which the head reads a draw (for FedCR)."""

    paper: ClassVar[str] = "Alemi et al., Deep Variational Information Bottleneck, 2017; as in FedCR"

    latent: Count = 64
    "numbers that the head reads"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return _random(super().build(shape, outputs), self.latent, outputs)


class GaussianMLP(MLP):
    """Fully connected layers whose last one gives a normal distribution, from which the head reads a draw."""

    latent: Count = 32
    "numbers that the head reads"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return _random(super().build(shape, outputs), self.latent, outputs)
