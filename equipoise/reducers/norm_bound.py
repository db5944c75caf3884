"""Norm bounding: differences that are too long are shortened."""

from math import floor
from typing import ClassVar, Literal

from torch import Tensor

from equipoise.reducers.base import ContextReducer, Part
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.differences import Differences, clipping
from equipoise.reducers.order import median
from equipoise.settings import Positive
from equipoise.state import State, Uploads, equal_shares


class NormBound(ContextReducer):
    """The mean of the differences from what clients began with, each cut to a largest length.

    It does not tell malicious clients from others, but bounds what each of them can do, however many they are.
    """

    paper: ClassVar[str] = "Sun et al., Can You Really Backdoor Federated Learning?, 2019; arc: Allouah et al., 2024"
    needs_origin: ClassVar[bool] = True

    bound: Positive | Literal["median", "arc"] = "median"
    "largest length: a number; the median length; or arc, the largest length but those of the k longest differences"
    malicious: Part = 0.2
    "fraction f/n of the clients that may be malicious, for arc: k = 2 (f/n) (n - f)"
    weighted: bool = False
    "whether the mean has the weights that clients send, which are not bounded"

    def _bound(self, norms: Tensor, sent: int) -> Tensor | float:
        if self.bound == "median":
            return median(norms[:, None])[0]
        if self.bound == "arc":
            f, n = round(self.malicious * sent), len(norms)
            k = floor(2 * f / n * (n - f) + 1e-9)
            return norms.sort().values[max(n - k, 1) - 1]
        return float(self.bound)

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        d = Differences(uploads, context.origin_for(uploads, self))
        norms = d.norms()
        factors = clipping(norms, self._bound(norms, uploads.sent))
        shares = uploads.weights() if self.weighted else equal_shares(len(uploads), uploads.like)
        return d.combined(shares.to(factors) * factors), context.memory
