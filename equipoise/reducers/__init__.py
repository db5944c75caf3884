"""The registry of reducers, which combine many messages into one; to add one, write a file and add a line here."""

from equipoise.reducers.base import ContextReducer, Reducer
from equipoise.reducers.bulyan import Bulyan
from equipoise.reducers.centered_clip import CenteredClip
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.crfl import CRFL
from equipoise.reducers.dnc import DnC
from equipoise.reducers.flame_filter import FlameFilter
from equipoise.reducers.fltrust import FLTrust
from equipoise.reducers.foolsgold import FoolsGold
from equipoise.reducers.geometric import GeometricMedian
from equipoise.reducers.krum import Krum, MultiKrum
from equipoise.reducers.mean import Mean, WeightedMean
from equipoise.reducers.median import Median, TrimmedMean
from equipoise.reducers.mixers import MIXERS
from equipoise.reducers.norm_bound import NormBound
from equipoise.reducers.rfa import RFA
from equipoise.reducers.sign_majority import SignMajority
from equipoise.registry import Registry

__all__ = [
    "CRFL",
    "MIXERS",
    "REDUCERS",
    "RFA",
    "Bulyan",
    "CenteredClip",
    "ContextReducer",
    "DnC",
    "FLTrust",
    "FlameFilter",
    "FoolsGold",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "MultiKrum",
    "NormBound",
    "Reducer",
    "ReductionContext",
    "SignMajority",
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
        "norm-bound": NormBound,
        "centered-clip": CenteredClip,
        "bulyan": Bulyan,
        "dnc": DnC,
        "fltrust": FLTrust,
        "foolsgold": FoolsGold,
        "sign-majority": SignMajority,
        "flame-filter": FlameFilter,
        "rfa": RFA,
        "crfl": CRFL,
    },
)
