"""Label skew by shards, as in the FedAvg paper."""

from typing import ClassVar, Literal

import numpy as np

from equipoise.data.partitions.base import Dealt
from equipoise.errors import EquipoiseError
from equipoise.settings import Count


class Shards(Dealt):
    """Samples sorted by label and cut into equal shards, dealt at random; two shards of a client may share a label."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    kind: Literal["shards"] = "shards"
    per_client: Count = 2
    "number of shards of each client"

    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        count = clients * self.per_client
        if count > len(labels):
            raise EquipoiseError(
                f"{clients} clients with {self.per_client} shards each need at least {count} samples, not {len(labels)}"
            )
        mixed = rng.permutation(len(labels))
        shards = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], count)
        hands = rng.permutation(count).reshape(clients, self.per_client)
        return [np.concatenate([shards[k] for k in hand]) for hand in hands]
