"""Distances between messages, from products that are summed over blocks of coordinates."""

import torch
from torch import Tensor

from equipoise.reducers.median import median
from equipoise.state import Uploads

_LARGEST = 1e120  # sums of squares of larger numbers may be infinite


def products(uploads: Uploads) -> Tensor:
    """Inner products of all messages, seen from the median of every coordinate, in float64.

    From there honest messages are short whatever the malicious send, so that their differences are not lost to
    rounding beside an attacker's huge numbers.
    """
    total = torch.zeros(len(uploads), len(uploads), dtype=torch.float64)
    for name in uploads.like:
        for rows in uploads.blocks(name):
            centred = (rows.double() - median(rows).double()).clamp(-_LARGEST, _LARGEST)
            total += centred @ centred.T
    return total


def squared_distances(gram: Tensor) -> Tensor:
    norms = gram.diagonal()
    return (norms[:, None] + norms - 2 * gram).clamp(min=0)
