"""The registry of partitions, one line per kind."""

from equipoise.data.partitions.base import Partition, adapt_partition
from equipoise.data.partitions.dirichlet import Dirichlet
from equipoise.data.partitions.hybrid import Hybrid
from equipoise.data.partitions.iid import IID
from equipoise.data.partitions.labels import Labels
from equipoise.data.partitions.natural import Natural
from equipoise.data.partitions.quality import Quality
from equipoise.data.partitions.quantity import Quantity
from equipoise.data.partitions.shards import Shards
from equipoise.registry import Registry

PARTITIONS = Registry(
    "partitions",
    Partition,  # type: ignore[type-abstract]
    {
        "iid": IID,
        "labels": Labels,
        "shards": Shards,
        "dirichlet": Dirichlet,
        "quantity": Quantity,
        "quality": Quality,
        "natural": Natural,
        "hybrid": Hybrid,
    },
    adapt_partition,
)
Partition.registry = PARTITIONS
