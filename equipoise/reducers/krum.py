"""Krum and multi-Krum, which select messages that have close neighbours."""

from typing import ClassVar

import torch
from torch import Tensor

from equipoise.reducers.base import Part, Reducer
from equipoise.reducers.distances import products, squared_distances
from equipoise.state import State, Uploads
from equipoise.torch_device import widened


def lowest(scores: Tensor, count: int) -> Tensor:
    """Return the weights of a mean over the lowest scores; messages that tie for the last places share them."""
    last = scores.sort().values[count - 1]
    ties = (scores - last).abs() <= 1e-9 * last
    below = (scores < last) & ~ties
    left = count - below.sum()
    return (widened(below) + widened(ties) * left / ties.sum()) / count


class MultiKrum(Reducer):
    """The mean of the messages that are closest to their neighbours; robust while 2 f + 2 < n, f of n malicious."""

    paper: ClassVar[str] = "Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017"

    malicious: Part = 0.2
    "fraction of the clients that may be malicious"

    def scores(self, uploads: Uploads) -> tuple[Tensor, int]:
        """Return each message's sum of squared distances to its n - f - 2 nearest neighbours, and n - f."""
        n = len(uploads)
        f = min(round(self.malicious * n), n - 1)
        distances = squared_distances(products(uploads)).fill_diagonal_(torch.inf)
        nearest = distances.sort(dim=1).values[:, : max(n - f - 2, min(1, n - 1))]
        return nearest.sum(dim=1), n - f

    def __call__(self, uploads: Uploads) -> State:
        return uploads.combined(lowest(*self.scores(uploads)))


class Krum(MultiKrum):
    """The one message that is closest to its neighbours; robust while 2 f + 2 < n, f of n malicious.

    Messages that tie (two that are each other's only neighbour always do) are averaged.
    """

    def __call__(self, uploads: Uploads) -> State:
        scores, _ = self.scores(uploads)
        return uploads.combined(lowest(scores, 1))
