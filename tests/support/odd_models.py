"""Models with layers that are hard for an engine."""

import numpy as np
import torch
from torch import nn

RNG = np.random.default_rng(0)


CLIENTS = [(RNG.normal(size=(20 + i, 4)).astype("float32"), RNG.integers(0, 3, 20 + i)) for i in range(4)]


def module(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs))
