"""The geometric median: the point with the smallest sum of distances to all messages."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from equipoise.reducers.base import Reducer
from equipoise.reducers.distances import products
from equipoise.state import State, Uploads

_SMOOTHING = 1e-9  # of the typical distance, to keep a message's weight finite where the point coincides with it


class GeometricMedian(Reducer):
    """The point with the smallest sum of distances to all messages; robust while fewer than half are malicious."""

    paper: ClassVar[str] = "Pillutla et al., Robust Aggregation for Federated Learning, IEEE TSP 2022"

    iterations: Annotated[int, Field(ge=1, le=100_000)] = 1000
    "largest number of iterations of Weiszfeld's algorithm"

    def __call__(self, uploads: Uploads) -> State:
        """Run Weiszfeld's algorithm on the messages' weights: distances follow from inner products alone."""
        gram = products(uploads)
        norms = gram.diagonal()
        single = norms.dtype == torch.float32  # on a device without float64
        floor = _SMOOTHING * norms.median().sqrt().clamp(min=1e-15 if single else 1e-150)
        # Start at the coordinate-wise median, which is the origin of the products.
        distances = norms.sqrt().clamp(min=floor)
        weights = torch.zeros_like(distances)
        for _ in range(self.iterations):
            before, weights = weights, (1 / distances) / (1 / distances).sum()
            seen = gram @ weights
            distances = (norms - 2 * seen + weights @ seen).clamp(min=0).sqrt().clamp(min=floor)
            if (weights - before).abs().max() <= (1e-6 if single else 1e-12):
                break
        return uploads.combined(weights)
