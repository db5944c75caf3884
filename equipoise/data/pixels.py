"""Pixels as bytes: images whose values are bytes divided by 255 take a quarter of the memory, and of its traffic.

The values that are computed with are the same bit for bit, so it is only a matter of speed and memory which images are
kept in this way.
"""

import torch
from torch import Tensor

_CHUNK = 1024  # samples that are converted at a time, so that intermediate results stay small
_LEAST = 4 << 20  # bytes of all inputs; fewer stay in a core's cache, where they are faster to read than to convert


def to_bytes(x: Tensor) -> Tensor | None:
    """Return the bytes that inputs were made of by a division by 255; None if they are something else, or few.

    The conversion is exact: `from_bytes` returns the same bits.

    Args:
        x: inputs of all samples.
    """
    if x.dtype != torch.float32 or not len(x) or x.numel() * x.element_size() < _LEAST:
        return None
    found = None
    for first in range(0, len(x), _CHUNK):
        chunk = x[first : first + _CHUNK]
        raw = (chunk * 255).round_().clamp_(0, 255).to(torch.uint8)
        if not torch.equal(from_bytes(raw, x.dtype).view(torch.int32), chunk.contiguous().view(torch.int32)):
            return None
        found = torch.empty(x.shape, dtype=torch.uint8) if found is None else found
        found[first : first + _CHUNK] = raw
    return found


def from_bytes(raw: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return bytes divided by 255, first in single precision, as images are read, then in another number format.

    Args:
        raw: the bytes.
        dtype: number format of the result.
        out: memory for the result.
    """
    if out is None:
        out = torch.empty(raw.shape, dtype=dtype, device=raw.device)
    if dtype == torch.float32:
        return out.copy_(raw).div_(255)
    return out.copy_(raw.to(torch.float32).div_(255))
