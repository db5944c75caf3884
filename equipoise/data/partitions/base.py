"""The contract of a partition, which decides who gets which samples, and helpers to divide samples.

Shares are disjoint, cover the samples that are divided, and depend on the seed only. Only a hybrid of two partitions of
the whole pool gives samples to two clients, as copies (`own_copies`).
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from equipoise.data.pool import Pool
from equipoise.data.text_encoding import numbered
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, Settings

Shares = dict[str, np.ndarray]
"""Indices of each client's samples, by the client's name."""


class Partition(Settings, ABC):
    """A way to divide a pool of samples over clients."""

    registry: ClassVar[Mapping[str, type["Partition"]]] = {}
    """All partitions by kind; set by the registry, which imports them."""

    min_samples: Count = 1
    "smallest number of samples of a client"

    @abstractmethod
    def __call__(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Shares:
        """Divide the samples.

        Args:
            pool: the samples; only their targets and owners are read.
            clients: the number of clients, or None if the user did not give it.
            rng: the source of randomness.
        """

    def with_at_least(self, samples: int) -> "Partition":
        """Return the partition with a larger smallest number of samples of a client, if its own is smaller."""
        return self.model_copy(update={"min_samples": max(self.min_samples, samples)})

    def variances(self, clients: int) -> np.ndarray:
        """Return the variance of the noise that is added to each client's inputs."""
        return np.zeros(clients)


def adapt_partition(name: str, found: Any) -> Any:
    """Return the user's own partition with its name as its kind; anything else is returned as it is.

    Args:
        name: the name that the user wrote.
        found: the object that has this name.
    """
    return _with_kind(name, found) if isinstance(found, type) and issubclass(found, Partition) else found


@cache  # so that the same code is the same class, and equal settings are equal
def _with_kind(name: str, found: type[Partition]) -> type[Partition]:
    attributes = {"__module__": found.__module__, "__doc__": found.__doc__, "__qualname__": found.__qualname__}
    kind = {"kind": name, "__annotations__": {"kind": Literal[name]}}
    return type(found.__name__, (found,), attributes | kind)


class Dealt(Partition, ABC):
    """A partition that creates its clients, rather than using the owners of the data."""

    needs_labels: ClassVar[bool] = True

    @abstractmethod
    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return one array of sample indices per client."""

    def __call__(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Shares:
        if clients is None:
            raise EquipoiseError("data.clients is missing; this partition needs the number of clients")
        if self.needs_labels and (pool.classes is None or pool.y.ndim != 1):
            raise EquipoiseError(
                f"the partition {type(self).__name__.lower()!r} needs data with one label per sample; for these data "
                "use 'natural', 'iid' or 'quantity'"
            )
        if clients * self.min_samples > len(pool):
            least = f" with data.partition.min_samples = {self.min_samples}" if self.min_samples > 1 else ""
            raise EquipoiseError(
                f"data.clients = {clients}{least} needs {clients * self.min_samples} samples, and there are {len(pool)}"
            )
        labels = pool.y.numpy() if self.needs_labels else np.zeros(len(pool), np.int64)
        shares = self.divide(labels, clients, rng)
        least_of_all = min(len(share) for share in shares)
        if least_of_all < self.min_samples:
            raise EquipoiseError(
                f"data.partition.min_samples = {self.min_samples} cannot be met: a client gets {least_of_all} samples; "
                "use fewer clients"
            )
        return dict(zip(numbered(clients), map(np.sort, shares), strict=True))


def own_copies(pool: Pool, shares: Shares) -> tuple[Pool, Shares]:
    """Return the pool and the shares with a copy of a sample for each client that has it; as they are if disjoint.

    Noise on inputs, or a poisoned label, is then that of one client alone.

    Args:
        pool: the samples.
        shares: indices of each client's samples, which may overlap.
    """
    taken = np.zeros(len(pool), dtype=bool)
    rows, disjoint, end = [np.arange(len(pool))], dict(shares), len(pool)
    for name, share in shares.items():
        again = taken[share]
        if again.any():
            disjoint[name] = np.where(again, end - 1 + np.cumsum(again), share)
            rows.append(share[again])
            end += int(again.sum())
        taken[share] = True
    if end == len(pool):
        return pool, shares
    if pool.series is not None:
        raise EquipoiseError("data.partition.pool = 'whole' is not possible with time series; use 'split'")
    note = (
        f"{end - len(pool)} samples belong to two clients (data.partition.pool = 'whole'): a test sample of one may be "
        "a training sample of the other, which flatters models that clients share"
    )
    every = torch.from_numpy(np.concatenate(rows))
    part = None if pool.part is None else pool.part[every.numpy()]
    return replace(pool, x=pool.x[every], y=pool.y[every], owner=None, part=part, notes=(*pool.notes, note)), disjoint


def proportions(beta: float, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draw from a Dirichlet distribution, also for a beta so small that every gamma variable would round to zero."""
    # log G(beta) = log G(beta + 1) + log(U) / beta; relative to the largest log(U), one is finite for any beta
    uniform = np.log(np.maximum(rng.random(clients), np.finfo(float).tiny))
    with np.errstate(over="ignore"):
        logs = np.log(rng.gamma(beta + 1, size=clients)) + (uniform - uniform.max()) / beta
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def cut(samples: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Cut samples into consecutive stretches with these weights, and return the index of each sample's stretch."""
    cuts = (np.cumsum(weights)[:-1] * len(samples)).round().astype(np.int64)
    return np.searchsorted(cuts, np.arange(len(samples)), side="right")


def by_owner(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """Return the sample indices of each owner."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def top_up(shares: list[np.ndarray], least: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Move samples from the largest shares to the small ones until every share has at least `least`."""
    largest_first = [(-len(share), i) for i, share in enumerate(shares)]
    heapq.heapify(largest_first)
    for poor in range(len(shares)):
        while (need := least - len(shares[poor])) > 0:
            size, rich = heapq.heappop(largest_first)
            moved = min(need, -size - least)
            pick = rng.permutation(-size)
            shares[poor] = np.concatenate([shares[poor], shares[rich][pick[:moved]]])
            shares[rich] = shares[rich][pick[moved:]]
            heapq.heappush(largest_first, (size + moved, rich))
    return shares
