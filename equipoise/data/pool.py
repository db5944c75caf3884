"""What a source gives: samples, their targets, and what is known of them."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Pool:
    x: Tensor
    y: Tensor
    classes: int | None
    "how many labels there are; None where the targets are numbers"
    owner: np.ndarray | None = None
    "for each sample the number of its owner in `names`, for the natural partition"
    names: tuple[str, ...] = ()
    "the owners' names; numbers stand for them because there may be millions of samples"
    part: np.ndarray | None = None
    "0, 1 or 2 where the source itself says what is for training, validation and test (time goes on, or it draws them)"
    portion: str = ""
    "what of the published data this is, where it is not all of it; every table says so"
    notes: tuple[str, ...] = field(default=())
    "what a user should know of how the data were read"

    def __len__(self) -> int:
        return len(self.y)

    def without_inputs(self, rows: np.ndarray) -> "Pool":
        """Targets and owners of these samples: what a partition looks at."""
        owner = None if self.owner is None else self.owner[rows]
        return replace(self, x=self.x[:0], y=self.y[torch.from_numpy(rows)], owner=owner, part=None)

    @property
    def owners(self) -> np.ndarray:
        """The name of each sample's owner."""
        assert self.owner is not None
        return np.asarray(np.array(self.names)[self.owner])


def as_images(raw: np.ndarray) -> Tensor:
    """(sample, channel, height, width) from 0 to 1; bytes are divided by 255, and grey images get their channel."""
    x = torch.from_numpy(raw).to(torch.float32)
    if raw.dtype == np.uint8:
        x.div_(255)
    return x.unsqueeze(1) if x.ndim == 3 else x
