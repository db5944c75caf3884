"""The natural partition: one client per owner of the data."""

from typing import Literal

import numpy as np

from equipoise.data.partitions.base import Partition, Shares, by_owner
from equipoise.data.pool import Pool
from equipoise.errors import EquipoiseError
from equipoise.settings import Count


class Natural(Partition):
    """One client per owner of the samples: a writer, a role, a household."""

    kind: Literal["natural"] = "natural"
    min_samples: Count = 1
    "smallest number of samples of an owner; owners with fewer are dropped"

    def __call__(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Shares:
        if pool.owner is None:
            raise EquipoiseError(
                "data.partition.kind = 'natural' needs data with known owners, such as digits-by-writer"
            )
        pieces = by_owner(pool.owner, len(pool.names))
        order = sorted(range(len(pieces)), key=lambda i: pool.names[i])
        enough = [i for i in order if len(pieces[i]) >= self.min_samples]
        if not enough or (clients is not None and clients > len(enough)):
            least = f" with at least {self.min_samples} samples" if self.min_samples > 1 else ""
            wanted = "" if clients is None else f"data.clients = {clients}, but "
            raise EquipoiseError(f"{wanted}these data come from only {len(enough)} owners{least}")
        if clients is not None:
            enough = [enough[i] for i in np.sort(rng.choice(len(enough), clients, replace=False))]
        return {pool.names[i]: pieces[i] for i in enough}
