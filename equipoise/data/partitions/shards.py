"""Label skew by shards, as FedAvg's paper has it."""

from typing import ClassVar, Literal

import numpy as np

from equipoise.data.partitions.base import Dealt
from equipoise.errors import EquipoiseError
from equipoise.settings import Count


class Shards(Dealt):
    """The samples sorted by label and cut into equal shards, dealt at random; a client may get two of one label."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    kind: Literal["shards"] = "shards"
    per_client: Count = 2
    "how many shards a client gets"

    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        count = clients * self.per_client
        if count > len(labels):
            raise EquipoiseError(
                f"{clients} clients of {self.per_client} shards need {count} samples, not {len(labels)}"
            )
        mixed = rng.permutation(len(labels))
        shards = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], count)
        hands = rng.permutation(count).reshape(clients, self.per_client)
        return [np.concatenate([shards[k] for k in hand]) for hand in hands]
