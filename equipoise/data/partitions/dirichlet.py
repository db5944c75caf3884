"""Label skew by a Dirichlet distribution."""

from typing import Literal

import numpy as np

from equipoise.data.partitions.base import Dealt, by_owner, cut, proportions, top_up
from equipoise.settings import Count, Positive


class Dirichlet(Dealt):
    """Samples of each label, divided in proportions from a Dirichlet distribution; a small beta is a strong skew."""

    kind: Literal["dirichlet"] = "dirichlet"
    beta: Positive = 0.5
    "concentration: near 0, each label belongs to few clients; large, all clients are alike"
    min_samples: Count = 10
    "smallest number of samples of a client, reached by moving samples from the largest clients"

    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        owner = np.empty(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            samples = rng.permutation(np.flatnonzero(labels == label))
            owner[samples] = cut(samples, proportions(self.beta, clients, rng))
        return top_up(by_owner(owner, clients), self.min_samples, rng)
