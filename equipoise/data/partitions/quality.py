"""Quality skew: equal shares, but each client's inputs are noisier than those of the client before."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from equipoise.data.partitions.iid import IID


class Quality(IID):
    """Equal shares of random samples, with Gaussian noise of variance sigma i / m on the inputs of client i of m."""

    paper: ClassVar[str] = "FLAME, Section VI-A: Gau(sigma i / m)"
    kind: Literal["quality"] = "quality"  # type: ignore[assignment]
    sigma: Annotated[float, Field(gt=0, le=1e6)] = 0.1
    "variance of the last client's noise"

    def variances(self, clients: int) -> np.ndarray:
        return self.sigma * np.arange(1, clients + 1) / clients
