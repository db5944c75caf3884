"""A module's buffers (BatchNorm statistics) as one vector."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def load_buffers(module: nn.Module, names: Sequence[str], vector: Tensor) -> None:
    """Copy a vector into the buffers with these names."""
    offset, buffers = 0, dict(module.named_buffers())
    for name in names:
        size = buffers[name].numel()
        buffers[name].copy_(vector[offset : offset + size].view(buffers[name].shape))
        offset += size


def read_buffers(module: nn.Module, names: Sequence[str], dtype: torch.dtype) -> Tensor:
    """Return the buffers with these names as one vector."""
    buffers = dict(module.named_buffers())
    return torch.cat([torch.empty(0, dtype=dtype), *(buffers[name].detach().flatten().to(dtype) for name in names)])
