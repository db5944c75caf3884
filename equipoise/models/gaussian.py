"""Networks with a random representation: drawn from one normal distribution per sample."""

from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.models.base import BodyAndHead
from equipoise.models.convolutional import LeNet
from equipoise.models.dense import MLP
from equipoise.settings import Count

ENCODER = "body.encoder"
"""The submodule whose outputs are the means and, through `normal`, the standard deviations."""


def normal(encoded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means and standard deviations, given the encoder's outputs."""
    mean, spread = encoded.chunk(2, dim=-1)
    return mean, nn.functional.softplus(spread)


class Draw(nn.Module):
    """Draws from the distribution in training, else gives its mean, from which a linear head gives the mean output.

    Several draws are several rows per sample: first one of each sample, then the next of each.
    """

    draws: ClassVar[bool] = True
    generator: torch.Generator | None = None
    "source of random numbers; by default torch's global one"

    def __init__(self, samples: int = 1):
        super().__init__()
        self.samples = samples

    def forward(self, encoded: Tensor) -> Tensor:
        mean, sd = normal(encoded)
        if not self.training:
            return mean
        source = mean.device if self.generator is None else self.generator.device
        noise = mean.new_empty(self.samples, *mean.shape, device=source).normal_(generator=self.generator)
        return (mean + sd * noise.to(mean.device)).flatten(0, 1)


def _random(module: Any, latent: int, draws: int, outputs: int) -> nn.Module:
    """Put a normal distribution between the body and the head of a network."""
    encoder = nn.Linear(module.head.in_features, 2 * latent)
    body = nn.Sequential(OrderedDict(features=module.body, encoder=encoder, draw=Draw(draws)))
    return BodyAndHead(body, nn.Linear(latent, outputs))


class GaussianLeNet(LeNet):
    """LeNet-5 whose last hidden layer gives a normal distribution; the head reads a draw from it (for FedCR)."""

    paper: ClassVar[str] = "Alemi et al., Deep Variational Information Bottleneck, 2017; as in FedCR"

    latent: Count = 64
    "number of inputs of the head"
    draws: Count = 1
    "draws per sample in training, over which the loss is averaged"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return _random(super().build(shape, outputs), self.latent, self.draws, outputs)


class GaussianMLP(MLP):
    """Fully connected layers of which the last one gives a normal distribution; the head reads a draw from it."""

    latent: Count = 32
    "number of inputs of the head"
    draws: Count = 1
    "draws per sample in training, over which the loss is averaged"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return _random(super().build(shape, outputs), self.latent, self.draws, outputs)
