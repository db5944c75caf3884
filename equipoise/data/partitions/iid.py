"""No skew."""

from typing import ClassVar, Literal

import numpy as np

from equipoise.data.partitions.base import Dealt


class IID(Dealt):
    """Equal shares of random samples."""

    kind: Literal["iid"] = "iid"
    needs_labels: ClassVar[bool] = False

    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(labels)), clients)
