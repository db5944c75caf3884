"""Models with layers that are hard for an engine."""

import numpy as np
import torch
from torch import nn

from equipoise.models.base import BodyAndHead

RNG = np.random.default_rng(0)


CLIENTS = [(RNG.normal(size=(20 + i, 4)).astype("float32"), RNG.integers(0, 3, 20 + i)) for i in range(4)]


def module(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs))


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten())
    return BodyAndHead(body, nn.Linear(12, 3))


def images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {name: (rng.normal(loc=k, size=(20, 2, 3, 3)), rng.integers(0, 3, 20)) for k, name in enumerate("abc")}
