"""What a source gives: samples, their targets, and who wrote them where that is known."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Pool:
    x: Tensor
    y: Tensor
    classes: int | None
    "how many labels there are; None where the targets are numbers"
    owners: np.ndarray | None = None
    "the name of each sample's owner, for the natural partition"

    def __len__(self) -> int:
        return len(self.x)
