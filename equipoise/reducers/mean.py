"""The usual means."""

from equipoise.reducers.base import Reducer
from equipoise.state import State, Uploads


class WeightedMean(Reducer):
    """The mean with the weights that the algorithm sends (usually numbers of samples); equal where it sends none."""

    def __call__(self, uploads: Uploads) -> State:
        if all(upload.weight is None for upload in uploads.uploads):
            return uploads.mean()
        return uploads.combined(uploads.weights())


class Mean(Reducer):
    """The mean in which every client counts once, whatever weight it claims."""

    def __call__(self, uploads: Uploads) -> State:
        return uploads.mean()
