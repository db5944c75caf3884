"""RFA: the weighted geometric median by a few smoothed Weiszfeld steps."""

from typing import Annotated, ClassVar

from pydantic import Field

from equipoise.reducers.base import Reducer
from equipoise.reducers.distances import products
from equipoise.settings import NonNegative, Positive
from equipoise.state import State, Uploads, equal_shares


class RFA(Reducer):
    """The point with the smallest weighted sum of distances, after a few smoothed Weiszfeld steps from the mean.

    alpha: the clients' weights; nu: the smoothing; v: the point. In the limit it withstands malicious clients with less
    than half of the weight. A few steps do not withstand huge messages, because they begin at the mean: use
    geometric-median, or 50 iterations and more.
    """

    paper: ClassVar[str] = "Pillutla et al., Robust Aggregation for Federated Learning, IEEE TSP 2022, Alg. 2"

    weighted: bool = True
    "whether alpha are the weights that clients send, as published; else all clients have the same"
    iterations: Annotated[int, Field(ge=1, le=100_000)] = 3
    "largest number of steps"
    nu: Positive = 1e-6
    "smallest distance that counts, so that no message has an infinite weight"
    tolerance: NonNegative = 1e-6
    "relative change of the weighted sum of distances below which the steps end"

    def __call__(self, uploads: Uploads) -> State:
        gram = products(uploads)
        norms = gram.diagonal()
        alpha = (uploads.weights() if self.weighted else equal_shares(len(uploads), uploads.like)).to(norms)
        share, before = alpha, None  # v = sum share_i x_i
        for step in range(self.iterations + 1):
            seen = gram @ share
            distances = (norms - 2 * seen + share @ seen).clamp(min=0).sqrt()
            objective = float(alpha @ distances)
            if step == self.iterations or (before is not None and abs(before - objective) < self.tolerance * before):
                break
            before = objective
            beta = alpha / distances.clamp(min=self.nu)
            share = beta / beta.sum()
        return uploads.combined(share)
