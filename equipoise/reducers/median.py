"""Coordinate by coordinate: the median, and the mean without the extremes."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equipoise.reducers.base import Reducer
from equipoise.state import State, Uploads


def median(rows: Tensor) -> Tensor:
    """The middle of each column, or the mean of the two in the middle (torch.median takes the lower one)."""
    ordered, half = rows.sort(dim=0).values, (len(rows) - 1) // 2
    return (ordered[half] + ordered[-1 - half]) / 2


class Median(Reducer):
    """The median of every coordinate; holds while fewer than half of the clients are malicious."""

    paper: ClassVar[str] = "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018"

    def __call__(self, uploads: Uploads) -> State:
        return uploads.each(median)


class TrimmedMean(Reducer):
    """The mean of every coordinate without its largest and smallest values; holds for up to `trim` of the clients."""

    paper: ClassVar[str] = "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018"

    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    "which part of the values is left out at either end"

    def dropped(self, clients: int) -> int:
        """How many values are left out at either end."""
        return min(round(self.trim * clients), (clients - 1) // 2)

    def __call__(self, uploads: Uploads) -> State:
        k = self.dropped(len(uploads))

        def trimmed(rows: Tensor) -> Tensor:
            kept = rows.sort(dim=0).values[k : len(rows) - k]
            # Rounding must not lead out of the range of what was kept.
            return torch.clamp(kept.mean(dim=0), kept[0], kept[-1])

        return uploads.each(trimmed)
