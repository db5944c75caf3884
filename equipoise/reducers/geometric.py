"""The geometric median: the point with the smallest sum of distances to all messages."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from equipoise.reducers.base import Reducer
from equipoise.reducers.distances import products
from equipoise.state import State, Uploads

_SMOOTHING = 1e-9  # of the typical distance: where the point meets a message, its weight must stay finite


class GeometricMedian(Reducer):
    """The point with the smallest sum of distances to all messages; holds while fewer than half are malicious."""

    paper: ClassVar[str] = "Pillutla et al., Robust Aggregation for Federated Learning, IEEE TSP 2022"

    iterations: Annotated[int, Field(ge=1, le=100_000)] = 1000
    "of Weiszfeld's algorithm, at most"

    def __call__(self, uploads: Uploads) -> State:
        """Weiszfeld's algorithm on weights of the messages: distances follow from their inner products alone."""
        gram = products(uploads)
        norms = gram.diagonal()
        floor = _SMOOTHING * norms.median().sqrt().clamp(min=1e-150)
        # It begins at the median of every coordinate, which is where the products are seen from.
        distances = norms.sqrt().clamp(min=floor)
        weights = torch.zeros_like(distances)
        for _ in range(self.iterations):
            before, weights = weights, (1 / distances) / (1 / distances).sum()
            seen = gram @ weights
            distances = (norms - 2 * seen + weights @ seen).clamp(min=0).sqrt().clamp(min=floor)
            if (weights - before).abs().max() <= 1e-12:
                break
        return uploads.combined(weights)
