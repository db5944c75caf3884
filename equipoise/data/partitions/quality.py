"""Quality skew: equal shares, but the inputs of one client are noisier than those of the one before."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from equipoise.data.partitions.iid import IID


class Quality(IID):
    """Equal shares at random; client i of m (from 1) gets Gaussian noise of variance sigma i / m on its inputs."""

    paper: ClassVar[str] = "FLAME, Section VI-A: Gau(sigma i / m)"
    kind: Literal["quality"] = "quality"  # type: ignore[assignment]
    sigma: Annotated[float, Field(gt=0, le=1e6)] = 0.1
    "variance of the noise of the last client"

    def variances(self, clients: int) -> np.ndarray:
        return self.sigma * np.arange(1, clients + 1) / clients
