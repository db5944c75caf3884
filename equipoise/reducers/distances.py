"""Distances between messages, from inner products that are summed over blocks of coordinates."""

import torch
from torch import Tensor

from equipoise.reducers.order import median
from equipoise.state import Uploads
from equipoise.torch_device import CPU, wide_dtype, widened

# Sums of squares of larger numbers may be infinite; float32 is for devices without float64.
LARGEST = {torch.float64: 1e120, torch.float32: 1e15}


def products(uploads: Uploads) -> Tensor:
    """Return the inner products of all messages, centred at the coordinate-wise median, in float64.

    Centred there, honest messages are short whatever malicious clients send, so that an attacker's huge numbers do not
    make their differences vanish in rounding.
    """
    device = next((t.device for t in uploads.like.values()), CPU)
    total = torch.zeros(len(uploads), len(uploads), dtype=wide_dtype(device), device=device)
    for name in uploads.like:
        for rows in uploads.blocks(name):
            centred = (widened(rows) - widened(median(rows))).clamp(-LARGEST[total.dtype], LARGEST[total.dtype])
            total += centred @ centred.T
    return total


def squared_distances(gram: Tensor) -> Tensor:
    """Return the squared distances between messages from their inner products."""
    norms = gram.diagonal()
    return (norms[:, None] + norms - 2 * gram).clamp(min=0)
