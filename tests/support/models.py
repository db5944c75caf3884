"""Models by name, and inputs for them."""

from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise.models import MODELS

TEXT = [name for name in MODELS if "transformer" in name]
SHAPES = {"linear": (7,), "lstm": (6, 2), **dict.fromkeys(TEXT, (5,))}
SMALLER: dict[str, dict[str, Any]] = {  # of the same kind, in less time
    "resnet-14": {"blocks": (1, 1, 1), "width": 8},
    "resnet-20": {"blocks": (1, 2, 1), "width": 8},
    "resnet-34": {"blocks": (1, 1, 1, 1), "width": 8},
    "resnet-18": {"width": 8},
    "resnet-5-blocks": {"channels": 8},
    "cnn-L": {"channels": 8},
    "transformer-8": {"width": 8, "layers": 2},
}
QUICK = [name for name in MODELS if name not in {*SMALLER, "transformer", "deq-resnet-s", "deq-resnet-m"}]


def inputs(name: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """What this model takes: small images, unless it is for something else."""
    shape = (n, *SHAPES.get(name, (2, 18, 17)))
    return rng.integers(0, 4, shape).astype("uint8") if name in TEXT else rng.normal(size=shape)


def built(name: str, **given: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name](**{**SMALLER.get(name, {}), **given}).build(SHAPES.get(name, (2, 18, 17)), 4)
