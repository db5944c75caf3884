"""The weighted and the unweighted mean."""

from equipoise.reducers.base import Reducer
from equipoise.state import State, Uploads


class WeightedMean(Reducer):
    """The mean with the weights that clients send (usually numbers of samples); unweighted if they send none."""

    def __call__(self, uploads: Uploads) -> State:
        return uploads.combined(uploads.weights()) if uploads.weighted else uploads.mean()


class Mean(Reducer):
    """The mean with equal weights, whatever weights clients send."""

    def __call__(self, uploads: Uploads) -> State:
        return uploads.mean()
