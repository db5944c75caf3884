"""The user's own clients as a pool: what `equipoise.train` takes, for the named data sets of the command line."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from equipoise.data.federation import SPLITS, Federation, from_clients
from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest
from equipoise.errors import EquipoiseError


def as_pool(found: Any, what: str, ask: LoadRequest) -> Pool:
    """Return what the user's function returned as a pool.

    Args:
        found: clients as `equipoise.train` takes them (a list, or a dictionary by name), a federation, a pool, or one
            pair of arrays (x, y) that a partition divides.
        what: what names the function, for error messages.
        ask: the request of the run.
    """
    if isinstance(found, Pool):
        return found
    if isinstance(found, Federation):
        return pool_of_federation(found, divided=True)
    if isinstance(found, tuple) and len(found) == 2 and all(hasattr(array, "shape") for array in found):
        whole = from_clients([found], split=(1.0, 0.0, 0.0), seed=ask.seed)
        return Pool(whole.x, whole.y, whole.classes)
    if isinstance(found, Mapping):
        return pool_of_clients([str(name) for name in found], list(found.values()), ask)
    if isinstance(found, Sequence) and not isinstance(found, str):
        return pool_of_clients(None, list(found), ask)
    raise EquipoiseError(
        f"{what} returned {type(found).__name__}; it must return the clients as equipoise.train takes them (a list, or "
        "a dictionary by name), a Federation, a Pool, or arrays (x, y) for a partition to divide"
    )


def pool_of_clients(names: Sequence[str] | None, clients: Sequence[Any], ask: LoadRequest) -> Pool:
    """Return clients, one entry each as `from_clients` takes them, as a pool of samples with owners.

    Args:
        names: the clients' names; None numbers them.
        clients: their samples.
        ask: the request of the run, with the split of samples that are not divided yet.
    """
    federation = from_clients(clients, names=names, split=ask.split, seed=ask.seed)
    # If nobody is divided, the split is left to the partition, which may give the samples to others.
    return pool_of_federation(federation, divided=any(isinstance(client, Mapping) for client in clients))


def pool_of_federation(federation: Federation, divided: bool) -> Pool:
    """Return the samples of a federation with their owners.

    Args:
        federation: the federation.
        divided: whether its division into training, validation and test samples is kept.
    """
    if federation.unseen:
        raise EquipoiseError("the federation has unseen clients; leave them to the setting data.unseen")
    splits = [getattr(federation, split) for split in SPLITS]
    shares = [[split[who] for split in splits] for who in range(len(federation))]
    rows = [np.concatenate(own) for own in shares]
    part = [np.repeat(np.arange(3), [len(indices) for indices in own]) for own in shares]
    order = [np.argsort(own, kind="stable") for own in rows]  # as they were given
    x, y = federation.gather(torch.from_numpy(np.concatenate([own[k] for own, k in zip(rows, order, strict=True)])))
    return Pool(
        x=x,
        y=y,
        classes=federation.classes,
        owner=np.repeat(np.arange(len(rows)), [len(own) for own in rows]),
        names=federation.names,
        part=np.concatenate([own[k] for own, k in zip(part, order, strict=True)]) if divided else None,
    )
