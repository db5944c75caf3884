"""Quality skew: equal shares, but the inputs of one client are noisier than those of the one before."""

from typing import ClassVar, Literal

import numpy as np

from equipoise.data.partitions.iid import IID
from equipoise.settings import Positive


class Quality(IID):
    """Equal shares at random; client i of m (from 1) gets Gaussian noise of variance sigma i / m on its inputs."""

    paper: ClassVar[str] = "FLAME, Section VI-A: Gau(sigma i / m)"
    kind: Literal["quality"] = "quality"  # type: ignore[assignment]
    sigma: Positive = 0.1
    "variance of the noise of the last client"

    def variances(self, clients: int) -> np.ndarray:
        return self.sigma * np.arange(1, clients + 1) / clients
