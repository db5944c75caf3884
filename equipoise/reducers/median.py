"""Coordinate-wise rules: the median, and the mean without the extremes."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equipoise.reducers.base import Reducer
from equipoise.reducers.order import median
from equipoise.state import State, Uploads


class Median(Reducer):
    """The median of every coordinate; robust while fewer than half of the clients are malicious."""

    paper: ClassVar[str] = "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018"

    def __call__(self, uploads: Uploads) -> State:
        return uploads.each(median)


class TrimmedMean(Reducer):
    """The mean of every coordinate without its extremes; robust while at most the fraction `trim` is malicious."""

    paper: ClassVar[str] = "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018"

    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    "fraction of the values that is dropped at each end"

    def dropped(self, clients: int, rows: int | None = None) -> int:
        """Return the number of values that are dropped at each end.

        Args:
            clients: number of messages that clients sent.
            rows: number of their mixtures, if they were mixed.
        """
        return min(round(self.trim * clients), ((rows or clients) - 1) // 2)

    def __call__(self, uploads: Uploads) -> State:
        k = self.dropped(uploads.sent, len(uploads))

        def trimmed(rows: Tensor) -> Tensor:
            kept = rows.sort(dim=0).values[k : len(rows) - k]
            # Rounding must not lead outside the range of the kept values.
            return torch.clamp(kept.mean(dim=0), kept[0], kept[-1])

        return uploads.each(trimmed)
