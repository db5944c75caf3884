"""The registry of reducers, which combine many messages into one; to add one, write a file and add a line here."""

from equipoise.reducers.base import Reducer
from equipoise.reducers.geometric import GeometricMedian
from equipoise.reducers.krum import Krum, MultiKrum
from equipoise.reducers.mean import Mean, WeightedMean
from equipoise.reducers.median import Median, TrimmedMean
from equipoise.registry import Registry

__all__ = [
    "REDUCERS",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "MultiKrum",
    "Reducer",
    "TrimmedMean",
    "WeightedMean",
]

REDUCERS = Registry(
    "reducers",
    Reducer,  # type: ignore[type-abstract]
    {
        "weighted-mean": WeightedMean,
        "mean": Mean,
        "median": Median,
        "trimmed-mean": TrimmedMean,
        "krum": Krum,
        "multi-krum": MultiKrum,
        "geometric-median": GeometricMedian,
    },
)
