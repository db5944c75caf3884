"""Label skew: each client has a few labels only."""

from typing import Literal

import numpy as np

from equipoise.data.partitions.base import Dealt
from equipoise.errors import EquipoiseError
from equipoise.settings import Count


class Labels(Dealt):
    """Only `per_client` labels for each client; every label is used, and its samples are divided evenly."""

    kind: Literal["labels"] = "labels"
    per_client: Count = 2
    "number of labels of each client"

    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        known = np.unique(labels)
        if self.per_client > len(known):
            raise EquipoiseError(f"data.partition.per_client = {self.per_client}, but there are {len(known)} labels")
        if clients * self.per_client < len(known):
            raise EquipoiseError(
                f"{clients} clients with {self.per_client} labels each cannot hold all {len(known)} labels; "
                "raise data.clients or data.partition.per_client"
            )
        # Each client gets the labels that were dealt least often so far, so that all are dealt equally often.
        dealt = np.zeros(len(known), dtype=np.int64)
        holders: list[list[int]] = [[] for _ in known]
        for client in range(clients):
            mine = np.lexsort((rng.random(len(known)), dealt))[: self.per_client]
            dealt[mine] += 1
            for label in mine:
                holders[label].append(client)
        shares: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for label, owners in zip(known, holders, strict=True):
            samples = rng.permutation(np.flatnonzero(labels == label))
            if len(samples) < len(owners):
                raise EquipoiseError(
                    f"label {label} has only {len(samples)} samples for {len(owners)} clients; use fewer clients"
                )
            for client, piece in zip(owners, np.array_split(samples, len(owners)), strict=True):
                shares[client].append(piece)
        return [np.concatenate(pieces) for pieces in shares]
