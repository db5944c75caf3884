"""A random projection of long vectors to short ones, the same for all clients, at the cost of one pass over the vector.

The coordinates of a vector are shuffled and distributed over the rows of P. Each entry of the result is the sum of its
row's coordinates with random signs, divided by the square root of their number. So the rows of P are orthonormal, and
only the order and the signs are stored.
"""

from functools import lru_cache

import torch
from torch import Tensor

from equipoise import randomness
from equipoise.torch_device import CPU, wide_dtype


class Projection:
    """The matrix P with d_sub orthonormal rows of length d: `P(v)` is P v, and `P.back(y)` is P' y."""

    def __init__(self, d: int, d_sub: int, seed: int, device: torch.device = CPU):
        rng = randomness.torch_generator(seed, "projection", d, d_sub)
        each = -(-d // d_sub)
        order = torch.randperm(d, generator=rng)
        signs = torch.randint(2, (d,), generator=rng) * 2.0 - 1
        self.shape = (d_sub, each)
        # Rows with one coordinate less are padded with an entry of weight zero.
        self.order = torch.zeros(d_sub * each, dtype=torch.int64)
        self.weights = torch.zeros(d_sub * each, dtype=torch.float64)
        rank = torch.arange(d)
        place = (rank % d_sub) * each + rank // d_sub
        counts = torch.bincount(rank % d_sub, minlength=d_sub)
        self.order[place] = order
        self.weights[place] = signs.double() / counts[rank % d_sub].double().sqrt()
        self.row = torch.empty(d, dtype=torch.int64)
        self.row[order] = rank % d_sub
        self.weight = torch.empty(d, dtype=torch.float64)
        self.weight[order] = self.weights[place]
        # Drawn on the CPU, so that it is the same on every device.
        self.order, self.row = self.order.to(device), self.row.to(device)
        self.weights, self.weight = (t.to(wide_dtype(device)).to(device) for t in (self.weights, self.weight))

    def __call__(self, v: Tensor) -> Tensor:
        dealt: Tensor = v.index_select(-1, self.order) * self.weights.to(v.dtype)
        return dealt.reshape(*v.shape[:-1], *self.shape).sum(-1)

    def back(self, y: Tensor) -> Tensor:
        """Multiply y by the transpose of P."""
        return y.index_select(-1, self.row) * self.weight.to(y.dtype)


@lru_cache(maxsize=4)
def projection(d: int, d_sub: int, seed: int, device: torch.device = CPU) -> Projection:
    """Return the projection from d to d_sub dimensions for a seed, on a device, from a cache."""
    return Projection(d, d_sub, seed, device)
