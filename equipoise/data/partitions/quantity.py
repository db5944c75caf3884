"""Quantity skew: all clients see the same kind of data, but not equally much."""

from typing import ClassVar, Literal

import numpy as np

from equipoise.data.partitions.base import Dealt, by_owner, cut, proportions, top_up
from equipoise.settings import Count, Positive


class Quantity(Dealt):
    """Samples drawn at random, in numbers whose proportions come from a Dirichlet distribution."""

    kind: Literal["quantity"] = "quantity"
    needs_labels: ClassVar[bool] = False
    beta: Positive = 0.5
    "concentration: near 0, few clients have nearly all; large, all have equally much"
    min_samples: Count = 10
    "a client with fewer is given some of those that have most"

    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        samples = rng.permutation(len(labels))
        owner = np.empty(len(labels), dtype=np.int64)
        owner[samples] = cut(samples, proportions(self.beta, clients, rng))
        return top_up(by_owner(owner, clients), self.min_samples, rng)
