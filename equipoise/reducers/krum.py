"""Krum and multi-Krum, which select messages that have close neighbours."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.reducers.base import Part, Reducer
from equipoise.reducers.distances import products, squared_distances
from equipoise.reducers.order import lowest
from equipoise.settings import Count
from equipoise.state import State, Uploads


class Krum(Reducer):
    """The one message that is closest to its neighbours; robust while 2 f + 2 < n, f of n malicious.

    Messages that tie (two that are each other's only neighbour always do) are averaged.
    """

    paper: ClassVar[str] = "Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017"

    malicious: Part = 0.2
    "fraction of the clients that may be malicious"
    distances: Literal["squared", "plain"] = "squared"
    "what a message's score sums: squared distances to its neighbours (the paper), or distances (FLAME's code)"

    def scores(self, uploads: Uploads) -> tuple[Tensor, int]:
        """Return each message's sum of (squared) distances to its n - f - 2 nearest neighbours, and n - f."""
        n = len(uploads)
        f = min(round(self.malicious * uploads.sent), n - 1)
        if uploads.sent > n and 2 * f + 2 >= n:
            raise EquipoiseError(
                f"after mixing there are {n} rows, of which up to {f} may be malicious, and Krum needs more than "
                f"{2 * f + 2}; mix fewer messages, or use a rule such as 'median'"
            )
        distances = squared_distances(products(uploads))
        distances = (distances if self.distances == "squared" else distances.sqrt()).fill_diagonal_(torch.inf)
        nearest = distances.sort(dim=1).values[:, : max(n - f - 2, min(1, n - 1))]
        return nearest.sum(dim=1), n - f

    def __call__(self, uploads: Uploads) -> State:
        scores, _ = self.scores(uploads)
        return uploads.combined(lowest(scores, 1))


class MultiKrum(Krum):
    """The mean of the messages that are closest to their neighbours; robust while 2 f + 2 < n, f of n malicious."""

    select: Count | None = None
    "number of messages that are averaged, at most all (5 in FLAME's code); by default n - f"

    def __call__(self, uploads: Uploads) -> State:
        scores, honest = self.scores(uploads)
        return uploads.combined(lowest(scores, honest if self.select is None else min(self.select, len(uploads))))
