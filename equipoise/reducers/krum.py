"""Krum and multi-Krum, which select messages that have close neighbours."""

from typing import ClassVar

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.reducers.base import Part, Reducer
from equipoise.reducers.distances import products, squared_distances
from equipoise.reducers.order import lowest
from equipoise.state import State, Uploads


class MultiKrum(Reducer):
    """The mean of the messages that are closest to their neighbours; robust while 2 f + 2 < n, f of n malicious."""

    paper: ClassVar[str] = "Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017"

    malicious: Part = 0.2
    "fraction of the clients that may be malicious"

    def scores(self, uploads: Uploads) -> tuple[Tensor, int]:
        """Return each message's sum of squared distances to its n - f - 2 nearest neighbours, and n - f."""
        n = len(uploads)
        f = min(round(self.malicious * uploads.sent), n - 1)
        if uploads.sent > n and 2 * f + 2 >= n:
            raise EquipoiseError(
                f"after mixing there are {n} rows, of which up to {f} may be malicious, and Krum needs more than "
                f"{2 * f + 2}; mix fewer messages, or use a rule such as 'median'"
            )
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
