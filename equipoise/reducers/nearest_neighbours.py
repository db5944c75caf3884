"""Nearest-neighbour mixing: each message is replaced by the mean of those nearest to it."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from equipoise.reducers.context import ReductionContext
from equipoise.reducers.distances import products, squared_distances
from equipoise.reducers.mixing import Mixed, Mixer
from equipoise.reducers.order import lowest
from equipoise.state import Uploads


class NearestNeighbours(Mixer):
    """Each message becomes the mean of the n - f nearest ones, itself included, f = `malicious` n.

    Messages that tie for the last place share it. The rule that follows gets as many rows as there are messages.
    """

    paper: ClassVar[str] = "Allouah et al., Fixing by Mixing: Optimal Byzantine ML under Heterogeneity, AISTATS 2023"

    malicious: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    "fraction of the clients that may be malicious"

    def __call__(self, uploads: Uploads, context: ReductionContext) -> Mixed:
        n = len(uploads)
        kept = n - min(round(self.malicious * uploads.sent), n - 1)
        distances = squared_distances(products(uploads)).fill_diagonal_(0)
        return Mixed(uploads, torch.stack([lowest(row, kept) for row in distances]), uploads.senders)
