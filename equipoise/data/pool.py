"""The pool: what a source returns, before it is divided over clients."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from equipoise.data.series_facts import SeriesFacts


@dataclass(frozen=True)
class Pool:
    """All samples of a data set, their targets, and what is known about them."""

    x: Tensor
    y: Tensor
    classes: int | None
    "number of labels; None where the targets are numbers"
    owner: np.ndarray | None = None
    "index of each sample's owner in `names`, for the natural partition"
    names: tuple[str, ...] = ()
    "names of the owners; samples refer to them by index because there may be millions of samples"
    part: np.ndarray | None = None
    "0, 1 or 2 for each sample where the source decides what is for training, validation and test; None: a random split"
    portion: str = ""
    "which portion of the published data this is, empty if it is all of them; every table shows it"
    notes: tuple[str, ...] = field(default=())
    "remarks for the user about how the data were read"
    series: SeriesFacts | None = None
    "the time series that the samples are windows of, and their scales, if they are"
    with_history: "Callable[[Collection[str], int], Pool] | None" = None
    "of time series: makes the pool again with only this many values of these owners before their test part"

    def __len__(self) -> int:
        return len(self.y)

    def without_inputs(self, rows: np.ndarray) -> "Pool":
        """Return a pool with only the targets and owners of these samples, which is all that a partition reads."""
        owner = None if self.owner is None else self.owner[rows]
        return replace(self, x=self.x[:0], y=self.y[torch.from_numpy(rows)], owner=owner, part=None)

    @property
    def owners(self) -> np.ndarray:
        """Return the name of each sample's owner."""
        assert self.owner is not None
        return np.asarray(np.array(self.names)[self.owner])


def as_images(raw: np.ndarray) -> Tensor:
    """Return images as (sample, channel, height, width): bytes are divided by 255, grey images get a channel axis."""
    x = torch.from_numpy(raw).to(torch.float32)
    if raw.dtype == np.uint8:
        x.div_(255)
    return x.unsqueeze(1) if x.ndim == 3 else x
