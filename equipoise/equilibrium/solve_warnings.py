"""Warnings of equilibrium layers, which name the layer and point at the user's own line of code."""

import sys
import warnings
from pathlib import Path
from types import FrameType

import torch
from torch import nn


def warn_if_calls_differ(f: object) -> None:
    """Warn of layers with which f(z) differs between calls."""
    varying = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for layer in f.modules() if isinstance(f, nn.Module) else ():
        if isinstance(layer, varying):
            warnings.warn(
                f"f has a {type(layer).__name__}, so that f(z) differs between calls and there may be no fixed point; "
                "use GroupNorm or LayerNorm, and VariationalDropout",
                stacklevel=user_stack_level(),
            )
            return


_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def user_stack_level() -> int:
    """Return how far up the stack, counted from the caller, the user's own code is."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    return level


def described(name: str, way: str) -> str:
    layer = f"the equilibrium layer {name}"
    return layer if way == "forward" else f"the gradient of {layer}"
