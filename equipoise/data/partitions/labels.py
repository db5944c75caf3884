"""Label skew: a few labels a client."""

from typing import Literal

import numpy as np

from equipoise.data.partitions.base import Dealt
from equipoise.errors import EquipoiseError
from equipoise.settings import Count


class Labels(Dealt):
    """Every client has samples of `per_client` labels only; every label is used, and shared out evenly."""

    kind: Literal["labels"] = "labels"
    per_client: Count = 2
    "how many labels a client has"

    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        known = np.unique(labels)
        if self.per_client > len(known):
            raise EquipoiseError(f"data.partition.per_client = {self.per_client}, but there are {len(known)} labels")
        if clients * self.per_client < len(known):
            raise EquipoiseError(
                f"{clients} clients of {self.per_client} labels cannot hold all {len(known)} labels; raise either"
            )
        # Deal the labels round after round, always those dealt least, so that all get out equally often.
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
                    f"label {label} has {len(samples)} samples for {len(owners)} clients; use fewer clients"
                )
            for client, piece in zip(owners, np.array_split(samples, len(owners)), strict=True):
                shares[client].append(piece)
        return [np.concatenate(pieces) for pieces in shares]
