"""The registry of mixers, which are applied before a reducer; to add one, write a file and add a line here."""

from equipoise.reducers.bucketing import Bucketing
from equipoise.reducers.mixing import Mixer
from equipoise.reducers.nearest_neighbours import NearestNeighbours
from equipoise.registry import Registry

MIXERS = Registry(
    "mixers",
    Mixer,  # type: ignore[type-abstract]
    {
        "bucketing": Bucketing,
        "nnm": NearestNeighbours,
    },
)
