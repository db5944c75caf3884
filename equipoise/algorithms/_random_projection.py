"""A random projection of long vectors to short ones, the same for all, that costs no more than a pass over the vector.

Coordinates are shuffled and dealt to the rows; a row is the sum of its own, each with a random sign, over the root of
their number. So the rows are orthonormal, and nothing but the shuffled order and the signs is kept.
"""

from functools import lru_cache

import torch
from torch import Tensor

from equipoise import randomness


class Projection:
    """P, with d_sub orthonormal rows of length d: `P(v)` is P v, and `P.back(y)` is its transpose times y."""

    def __init__(self, d: int, d_sub: int, seed: int):
        rng = randomness.torch_generator(seed, "projection", d, d_sub)
        each = -(-d // d_sub)
        order = torch.randperm(d, generator=rng)
        signs = torch.randint(2, (d,), generator=rng) * 2.0 - 1
        self.shape = (d_sub, each)
        # Rows whose share is one short end with a stand-in of weight zero.
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

    def __call__(self, v: Tensor) -> Tensor:
        dealt: Tensor = v.index_select(-1, self.order) * self.weights.to(v.dtype)
        return dealt.reshape(*v.shape[:-1], *self.shape).sum(-1)

    def back(self, y: Tensor) -> Tensor:
        return y.index_select(-1, self.row) * self.weight.to(y.dtype)


@lru_cache(maxsize=4)
def projection(d: int, d_sub: int, seed: int) -> Projection:
    return Projection(d, d_sub, seed)
