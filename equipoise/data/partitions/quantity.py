"""Quantity skew: all clients have the same kind of data, but different amounts."""

from typing import ClassVar, Literal

import numpy as np

from equipoise.data.partitions.base import Dealt, by_owner, cut, proportions, top_up
from equipoise.settings import Count, Positive


class Quantity(Dealt):
    """Random samples; the sizes of the clients have proportions from a Dirichlet distribution."""

    kind: Literal["quantity"] = "quantity"
    needs_labels: ClassVar[bool] = False
    beta: Positive = 0.5
    "concentration: near 0, few clients have nearly all samples; large, all have equally many"
    min_samples: Count = 10
    "smallest number of samples of a client, reached by moving samples from the largest clients"

    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        samples = rng.permutation(len(labels))
        owner = np.empty(len(labels), dtype=np.int64)
        owner[samples] = cut(samples, proportions(self.beta, clients, rng))
        return top_up(by_owner(owner, clients), self.min_samples, rng)
