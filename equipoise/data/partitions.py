"""Partitions: who gets which samples. Shares are disjoint, cover what is divided, and come from the seed alone."""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from equipoise.data.pool import Pool
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, Positive, Settings

Shares = dict[str, np.ndarray]


class Partition(Settings, ABC):
    """From a pool of samples to every client's share of it, by the client's name."""

    @abstractmethod
    def __call__(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Shares:
        """`clients` is how many there are to be, if the user said so."""


class Dealt(Partition, ABC):
    """A partition that invents its clients."""

    @abstractmethod
    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """One array of sample numbers a client."""

    def __call__(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Shares:
        if clients is None:
            raise EquipoiseError("data.clients is missing; this partition must be told how many clients there are")
        if clients > len(pool):
            raise EquipoiseError(f"data.clients = {clients} is more than the {len(pool)} samples there are")
        shares = self.divide(pool.y.numpy(), clients, rng)
        digits = len(str(clients - 1))
        return {f"client-{i:0{digits}d}": np.sort(share) for i, share in enumerate(shares)}


class IID(Dealt):
    """Everybody gets an equal share, drawn at random."""

    kind: Literal["iid"] = "iid"

    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(labels)), clients)


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


class Dirichlet(Dealt):
    """Each label is shared out by proportions drawn from a Dirichlet distribution; a small beta is a strong skew."""

    kind: Literal["dirichlet"] = "dirichlet"
    beta: Positive = 0.5
    "concentration: near 0, labels live with few clients; large, all clients are alike"
    min_samples: Count = 10
    "a client with fewer is given some of those that have most"

    def divide(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        if clients * self.min_samples > len(labels):
            raise EquipoiseError(
                f"data.partition.min_samples = {self.min_samples} for {clients} clients needs "
                f"{clients * self.min_samples} samples, and there are {len(labels)}"
            )
        owner = np.empty(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            samples = rng.permutation(np.flatnonzero(labels == label))
            cuts = (np.cumsum(_proportions(self.beta, clients, rng))[:-1] * len(samples)).round().astype(np.int64)
            owner[samples] = np.searchsorted(cuts, np.arange(len(samples)), side="right")
        return top_up([np.flatnonzero(owner == i) for i in range(clients)], self.min_samples, rng)


class Natural(Partition):
    """The clients are the people whom the samples come from."""

    kind: Literal["natural"] = "natural"

    def __call__(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Shares:
        if pool.owners is None:
            raise EquipoiseError(
                "data.partition.kind = 'natural' needs data that name their owners, such as digits-by-writer"
            )
        names, owner = np.unique(pool.owners, return_inverse=True)
        if clients is not None and clients > len(names):
            raise EquipoiseError(f"data.clients = {clients}, but these data come from only {len(names)} owners")
        order = np.argsort(owner, kind="stable")
        pieces = np.split(order, np.cumsum(np.bincount(owner))[:-1])
        chosen = range(len(names)) if clients is None else np.sort(rng.choice(len(names), clients, replace=False))
        return {str(names[i]): pieces[i] for i in chosen}


def _proportions(beta: float, clients: int, rng: np.random.Generator) -> np.ndarray:
    """A Dirichlet draw that stays one when beta is so small that every gamma variable rounds to zero."""
    # log G(beta) = log G(beta + 1) + log(U) / beta, a sum of logarithms that cannot underflow together
    logs = np.log(rng.gamma(beta + 1, size=clients)) + np.log(rng.random(clients)) / beta
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def top_up(shares: list[np.ndarray], least: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Move samples from the largest shares until nobody has fewer than `least`; ends, as every move helps."""
    sizes = np.array([len(share) for share in shares])
    for poor in np.flatnonzero(sizes < least):
        while sizes[poor] < least:
            rich = int(np.argmax(sizes))
            moved = min(least - sizes[poor], sizes[rich] - least)
            pick = rng.permutation(len(shares[rich]))
            shares[poor] = np.concatenate([shares[poor], shares[rich][pick[:moved]]])
            shares[rich] = shares[rich][pick[moved:]]
            sizes[poor], sizes[rich] = len(shares[poor]), len(shares[rich])
    return shares


PARTITIONS: dict[str, type[Partition]] = {"iid": IID, "labels": Labels, "dirichlet": Dirichlet, "natural": Natural}
