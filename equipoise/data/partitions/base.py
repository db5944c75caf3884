"""What a partition is: who gets which samples. Shares are disjoint, cover what is divided, and come from the seed."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from equipoise.data.pool import Pool
from equipoise.data.text_encoding import numbered
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, Settings

Shares = dict[str, np.ndarray]


class Partition(Settings, ABC):
    """From a pool of samples to every client's share of it, by the client's name."""

    registry: ClassVar[Mapping[str, type["Partition"]]] = {}
    """All partitions by kind; filled in by the registry, which imports them."""

    min_samples: Count = 1
    "no client has fewer"

    @abstractmethod
    def __call__(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Shares:
        """`clients` is how many there are to be, if the user said so."""

    def variances(self, clients: int) -> np.ndarray:
        """The variance of the noise that each client's inputs get."""
        return np.zeros(clients)


class Dealt(Partition, ABC):
    """A partition that invents its clients."""

    needs_labels: ClassVar[bool] = True

    @abstractmethod
    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """One array of sample numbers a client."""

    def __call__(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Shares:
        if clients is None:
            raise EquipoiseError("data.clients is missing; this partition must be told how many clients there are")
        if self.needs_labels and (pool.classes is None or pool.y.ndim != 1):
            raise EquipoiseError(
                f"the partition {type(self).__name__.lower()!r} needs data with one label a sample; for these data "
                "there is 'natural', 'iid' or 'quantity'"
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
                f"data.partition.min_samples = {self.min_samples} cannot be had: a client gets {least_of_all} samples; "
                "use fewer clients"
            )
        return dict(zip(numbered(clients), map(np.sort, shares), strict=True))


def proportions(beta: float, clients: int, rng: np.random.Generator) -> np.ndarray:
    """A Dirichlet draw that stays one when beta is so small that every gamma variable rounds to zero."""
    # log G(beta) = log G(beta + 1) + log(U) / beta; counted from the largest log(U), one is finite for any beta
    uniform = np.log(np.maximum(rng.random(clients), np.finfo(float).tiny))
    with np.errstate(over="ignore"):
        logs = np.log(rng.gamma(beta + 1, size=clients)) + (uniform - uniform.max()) / beta
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def cut(samples: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """For each sample in its order the number of the client whose stretch it lies in."""
    cuts = (np.cumsum(weights)[:-1] * len(samples)).round().astype(np.int64)
    return np.searchsorted(cuts, np.arange(len(samples)), side="right")


def by_owner(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """The sample numbers of each owner."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def top_up(shares: list[np.ndarray], least: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Move samples from the largest shares until nobody has fewer than `least`; ends, as every move helps."""
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
