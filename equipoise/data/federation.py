"""A federation: pooled samples, and for every client the numbers of its own for training, validation and test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise import randomness
from equipoise.data.text_encoding import numbered
from equipoise.errors import EquipoiseError
from equipoise.settings import nearest

SPLITS = ("train", "validation", "test")
SPLIT = (0.7, 0.1, 0.2)
"""The part of each where nothing else is said."""


class RaggedIndices:
    """Lists of different lengths in one flat array, so that a million clients cost two arrays."""

    def __init__(self, lists: Sequence[np.ndarray]):
        self.lengths = np.array([len(part) for part in lists], dtype=np.int64)
        self.ends = np.cumsum(self.lengths)
        self.flat = np.concatenate([np.empty(0, np.int64), *lists]).astype(np.int64)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.flat[self.ends[i] - self.lengths[i] : self.ends[i]]

    def __len__(self) -> int:
        return len(self.lengths)


class BatchBuffer:
    """Room for a batch, used again and again: new memory is slow to touch for the first time."""

    def __init__(self) -> None:
        self.room: Tensor | None = None

    def take(self, like: Tensor, samples: int) -> Tensor:
        if self.room is None or len(self.room) < samples or self.room.shape[1:] != like.shape[1:]:
            self.room = like.new_empty((samples, *like.shape[1:]))
        return self.room[:samples]


@dataclass(frozen=True)
class Federation:
    """Samples x with targets y, and who owns which. Nothing is copied a client."""

    x: Tensor
    y: Tensor
    names: tuple[str, ...]
    train: RaggedIndices
    validation: RaggedIndices
    test: RaggedIndices
    classes: int | None = None
    """how many labels there are; None where the targets are numbers"""
    channels_last: bool = False
    """x lies as (sample, height, width, channel): rows are fetched fast and convolutions like them so"""
    unseen: frozenset[str] = frozenset()
    """names of the clients that take no part in training"""
    title: str = ""
    """what the data are called in tables"""
    notes: tuple[str, ...] = ()
    """what a user should know of them"""

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise EquipoiseError(f"two clients are named {twice!r}; every client needs a name of its own")
        for name, length in zip(self.names, self.train.lengths, strict=True):
            if length == 0:
                raise EquipoiseError(
                    f"client {name!r} has no training samples; give it some, leave it out, or use fewer clients"
                )
        if self.names and len(self.unseen) >= len(self.names):
            raise EquipoiseError("all clients are unseen; somebody must take part in training")

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def numbers(self) -> dict[int, int]:
        """Every client's number in the order of names, those that train before the others: so servers know them."""
        training, unseen = self.by_name
        return {who: number for number, who in enumerate([*training, *unseen])}

    @cached_property
    def by_name(self) -> tuple[list[int], list[int]]:
        """The clients that train, and those that do not, each in the order of their names."""
        order = sorted(range(len(self)), key=lambda i: self.names[i])
        training = [i for i in order if self.names[i] not in self.unseen]
        return training, [i for i in order if self.names[i] in self.unseen]

    @property
    def outputs(self) -> int:
        """How many numbers a model must give for a sample (or for each position in it)."""
        return self.classes or self.y[0].numel()

    def holding_out(self, fraction: float, seed: int) -> "Federation":
        """With this part of the clients, drawn from the seed, held out of training."""
        if not fraction:
            return self
        names = sorted(self.names)
        count = max(1, round(fraction * len(names)))
        chosen = randomness.generator(seed, "unseen").choice(len(names), count, replace=False)
        return replace(self, unseen=frozenset(names[i] for i in chosen))

    def keeping(self, only: Sequence[str] | None) -> "Federation":
        """With the clients of these names alone."""
        if only is None:
            return self
        for name in only:
            if name not in self.names:
                raise EquipoiseError(f"data.only names {name!r}, which is no client{nearest(name, self.names)}")
        kept = [i for i, name in enumerate(self.names) if name in set(only)]
        train, validation, test = (
            RaggedIndices([s[i] for i in kept]) for s in (self.train, self.validation, self.test)
        )
        names = tuple(self.names[i] for i in kept)
        return replace(self, names=names, train=train, validation=validation, test=test)

    def training_on(self, most: int | None, seed: int) -> "Federation":
        """With no client training on more samples than this; which ones is drawn from the seed."""
        if most is None:
            return self
        kept = []
        for i, name in enumerate(self.names):
            own = self.train[i]
            drawn = randomness.generator(seed, "most", name).permutation(len(own))[:most]
            kept.append(own[np.sort(drawn)])
        return replace(self, train=RaggedIndices(kept))

    def called(self, title: str, notes: tuple[str, ...] = ()) -> "Federation":
        return replace(self, title=title, notes=notes)

    def gather(self, indices: Tensor, memory: BatchBuffer | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples; with `memory`, the inputs last until it is used again."""
        out = None if memory is None else memory.take(self.x, len(indices))
        x = torch.index_select(self.x, 0, indices, out=out)
        return x.permute(0, 3, 1, 2) if self.channels_last else x, self.y.index_select(0, indices)

    def fingerprint(self, splits: bool = False) -> str:
        """Stands for all samples and the clients' names in their order; with `splits`, also for who has which."""
        hasher = blake2b("\n".join([*self.names, "", *sorted(self.unseen)]).encode(), digest_size=8)
        shares = [s.flat for s in (self.train, self.validation, self.test)] if splits else []
        for array in (self.x.numpy(), self.y.numpy(), *shares):
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()

    def sample(self) -> tuple[Tensor, Tensor]:
        """Two samples, to see what the model makes of them."""
        return self.gather(torch.from_numpy(np.resize(self.train[0], 2)))

    def prepared(self, dtype: torch.dtype, channels_last: bool) -> "Federation":
        """In the numbers and the layout in which the model is trained."""
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (self.x, self.y))
        channels_last = channels_last and x.ndim == 4 and not self.channels_last
        x = x.permute(0, 2, 3, 1).contiguous() if channels_last else x.contiguous()
        return replace(self, x=x, y=y, channels_last=channels_last or self.channels_last)


def check_split(split: Sequence[float]) -> None:
    good = len(split) == 3 and min(split) >= 0 and split[0] > 0 and abs(sum(split) - 1) <= 1e-6
    if not good:
        raise EquipoiseError(
            f"data.split = {list(split)} is not allowed; it must be three fractions "
            "(train, validation, test) that sum to 1, the first above 0"
        )


def split_sizes(n: int, fractions: Sequence[float]) -> tuple[int, int, int]:
    """How many of n samples are for training, validation and test; training never goes empty-handed."""
    validation, test = (round(n * f) for f in fractions[1:])
    while n and validation + test >= n:  # tiny clients: training comes first
        validation, test = (validation - 1, test) if validation else (validation, test - 1)
    return n - validation - test, validation, test


def split_client(indices: np.ndarray, fractions: Sequence[float], rng: np.random.Generator) -> list[np.ndarray]:
    """One client's samples as train, validation and test, at random; training never goes empty-handed."""
    train, validation, _ = split_sizes(len(indices), fractions)
    return np.split(rng.permutation(indices), [train, train + validation])


def from_shares(
    x: Tensor,
    y: Tensor,
    shares: Mapping[str, np.ndarray],
    split: Sequence[float],
    seed: int,
    classes: int | None = None,
    part: np.ndarray | None = None,
) -> Federation:
    """A federation from every client's share of the pool, split by the client's name, or as `part` says."""
    if part is None:
        parts = [split_client(share, split, randomness.generator(seed, "split", n)) for n, share in shares.items()]
    else:
        parts = [[share[part[share] == k] for k in range(3)] for share in shares.values()]
    train, validation, test = (RaggedIndices([part[k] for part in parts]) for k in range(3))
    return Federation(x, y, tuple(shares), train, validation, test, classes)


def from_clients(
    clients: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    split: Sequence[float] = SPLIT,
    seed: int = 0,
) -> Federation:
    """A federation from a list with one entry a client.

    An entry is a pair of arrays (x, y), a torch Dataset of such pairs, or a dictionary with any of those
    under "train" and, if there are any, "validation" and "test". Entries that are not split yet are split.
    """
    if not clients:
        raise EquipoiseError("the list of clients is empty; give at least one (x, y)")
    check_split(split)
    names = numbered(len(clients)) if names is None else [str(name) for name in names]
    if len(names) != len(clients):
        raise EquipoiseError(f"there are {len(clients)} clients and {len(names)} names; give one name a client")
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    columns: list[list[np.ndarray]] = [[], [], []]
    count = 0

    def take(part: Any, name: str) -> np.ndarray:
        nonlocal count
        x, y = _pair(part, name)
        xs.append(x)
        ys.append(y)
        count += len(x)
        return np.arange(count - len(x), count)

    for name, client in zip(names, clients, strict=True):
        if isinstance(client, Mapping):
            unknown = set(client) - set(SPLITS)
            if unknown or "train" not in client:
                raise EquipoiseError(
                    f"client {name!r} has the parts {sorted(client)}; it needs 'train', may have 'validation', 'test'"
                )
            parts = [take(client[k], name) if k in client else np.empty(0, np.int64) for k in SPLITS]
        else:
            parts = split_client(take(client, name), split, randomness.generator(seed, "split", name))
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    for what, arrays in (("samples", xs), ("targets", ys)):
        shapes = {tuple(array.shape[1:]) for array in arrays}
        if len(shapes) > 1:
            raise EquipoiseError(f"clients' {what} have different shapes: {', '.join(map(str, sorted(shapes)))}")
    y = torch.cat(ys)
    classes = None if y.is_floating_point() or not len(y) else int(y.max()) + 1
    train, validation, test = (RaggedIndices(column) for column in columns)
    return Federation(torch.cat(xs), y, tuple(names), train, validation, test, classes)


def _pair(part: Any, name: str) -> tuple[Tensor, Tensor]:
    if not isinstance(part, (tuple, list)) and hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        samples = [part[i] for i in range(len(part))]  # a torch Dataset
        if not samples:
            raise EquipoiseError(f"client {name!r} has no samples; give it some, or leave it out")
        part = tuple(torch.stack([torch.as_tensor(s[k]) for s in samples]) for k in (0, 1))
    try:
        x, y = (torch.as_tensor(np.asarray(a)) if not isinstance(a, Tensor) else a for a in part)
    except (TypeError, ValueError) as error:
        raise EquipoiseError(f"client {name!r} needs a pair of arrays (x, y) and has something else: {error}") from None
    if len(x) != len(y):
        raise EquipoiseError(f"client {name!r} has {len(x)} inputs and {len(y)} targets; there must be as many of each")
    return x, y if y.is_floating_point() else y.long()
