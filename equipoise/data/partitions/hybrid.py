"""Hybrid skew: two partitions in one federation."""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from equipoise.data.partitions.base import Dealt, Partition, Shares, adapt_partition
from equipoise.data.partitions.labels import Labels
from equipoise.data.partitions.natural import Natural
from equipoise.data.partitions.quantity import Quantity
from equipoise.data.pool import Pool
from equipoise.data.text_encoding import numbered
from equipoise.errors import EquipoiseError
from equipoise.registry import Registry, choose


class Hybrid(Partition):
    """Two partitions in one federation: each divides a random part of the pool over its part of the clients.

    With `pool = "whole"` each divides all of it, so that a sample belongs to two clients, and may be a test sample of
    one and a training sample of the other.
    """

    paper: ClassVar[str] = "FLAME, Section VI-A: half labels, half quantity"
    kind: Literal["hybrid"] = "hybrid"
    first: Partition = Labels(per_client=2)
    "partition of the first clients"
    second: Partition = Quantity(beta=0.5)
    "partition of the other clients"
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    "fraction of the clients (and of the samples) that the first partition gets"
    pool: Literal["split", "whole"] = "split"
    "what each partition divides: a part of the samples, or all of them, as in FLAME's published code"

    @field_validator("first", "second", mode="before")
    @classmethod
    def _by_kind(cls, value: Any, info: Any) -> Any:
        if not isinstance(value, dict):
            return value
        others = {name: kind for name, kind in cls.registry.items() if kind is not cls}
        kinds = Registry("partitions", Partition, others, adapt_partition)  # type: ignore[type-abstract]
        return choose(kinds, value, f"data.partition.{info.field_name}", "kind")[1]

    def table(self) -> dict[str, Any]:
        return super().table() | {"first": self.first.table(), "second": self.second.table()}

    def _firsts(self, clients: int) -> int:
        return min(max(round(self.fraction * clients), 1), clients - 1)

    def __call__(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Shares:
        if clients is None or clients < 2:
            raise EquipoiseError("data.clients must be at least 2 for a hybrid partition")
        if isinstance(self.first, Natural) and isinstance(self.second, Natural):
            raise EquipoiseError("data.partition has natural twice; a hybrid needs two different kinds")
        firsts = self._firsts(clients)
        mixed = rng.permutation(len(pool))
        cut = round(len(pool) * firsts / clients)
        parts = (mixed[:cut], mixed[cut:]) if self.pool == "split" else (mixed, mixed)
        names = numbered(clients)
        while set(names) & set(pool.names):  # owners may have such names too, and both may be in one federation
            names = [f"dealt-{name}" for name in names]
        shares: Shares = {}
        for part, count, rows, known in (
            (self.first, firsts, np.sort(parts[0]), names[:firsts]),
            (self.second, clients - firsts, np.sort(parts[1]), names[firsts:]),
        ):
            side = part(pool.without_inputs(rows), count, rng)
            renamed = known if isinstance(part, Dealt) else list(side)
            shares |= {name: rows[share] for name, share in zip(renamed, side.values(), strict=True)}
        short = min(len(share) for share in shares.values())
        if short < self.min_samples:
            raise EquipoiseError(
                f"data.partition.min_samples = {self.min_samples} cannot be met: a client gets {short} samples; "
                "set it in first and second, or use fewer clients"
            )
        return shares

    def with_at_least(self, samples: int) -> "Hybrid":
        sides = {"first": self.first.with_at_least(samples), "second": self.second.with_at_least(samples)}
        own = {"min_samples": max(self.min_samples, samples)}
        return self.model_copy(update=sides | own)

    def variances(self, clients: int) -> np.ndarray:
        firsts = self._firsts(clients)
        return np.concatenate([self.first.variances(firsts), self.second.variances(clients - firsts)])
