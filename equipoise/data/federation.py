"""A federation: pooled samples, and for every client the indices of its training, validation and test samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from equipoise import randomness
from equipoise.data.pixels import from_bytes, to_bytes
from equipoise.data.samples import SPLITS as SPLITS
from equipoise.data.samples import as_pair, named_clients
from equipoise.data.series_facts import SeriesFacts
from equipoise.errors import EquipoiseError
from equipoise.settings import nearest
from equipoise.state import State
from equipoise.torch_device import has_room

SPLIT = (0.7, 0.1, 0.2)
"""The default fractions of training, validation and test samples."""
_CHUNK = 1024  # samples that are converted at a time
STREAMED_BYTES = 64 << 20
"""Size of the samples that are fetched together on an accelerator, where every call and every copy takes time."""


class RaggedIndices:
    """Lists of indices of different lengths in one flat array: a million clients need three arrays, not a million."""

    def __init__(self, lists: Sequence[np.ndarray]):
        self.lengths = np.array([len(part) for part in lists], dtype=np.int64)
        self.ends = np.cumsum(self.lengths)
        self.flat = np.concatenate([np.empty(0, np.int64), *lists]).astype(np.int64, copy=False)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.flat[self.ends[i] - self.lengths[i] : self.ends[i]]

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"RaggedIndices({len(self)} lists, {len(self.flat)} indices)"


class BatchBuffer:
    """Memory for a batch that is reused, because the first access to new memory is slow."""

    def __init__(self) -> None:
        self.rooms: dict[torch.dtype, Tensor] = {}
        self.parts: dict[torch.dtype, Tensor] = {}

    def take(self, samples: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for samples of this shape; it is valid until the next call with the same number format."""
        room = self.rooms.get(dtype)
        if room is None or len(room) < samples or room.shape[1:] != shape:
            room = self.rooms[dtype] = torch.empty((samples, *shape), dtype=dtype, device=device)
            self.parts.pop(dtype, None)
        part = self.parts.get(dtype)
        if part is None or len(part) != samples:  # the same tensor is returned as long as possible
            part = self.parts[dtype] = room[:samples]
        return part


class PinnedMemory(BatchBuffer):
    """Memory from which a GPU copies by itself."""

    def take(self, samples: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory for samples of this shape."""
        return torch.empty((samples, *shape), dtype=dtype, pin_memory=True)


@dataclass(frozen=True, repr=False)
class Federation:
    """Samples x with targets y, and the indices that each client owns; no samples are copied per client."""

    x: Tensor
    y: Tensor
    names: tuple[str, ...]
    train: RaggedIndices
    validation: RaggedIndices
    test: RaggedIndices
    classes: int | None = None
    """number of labels; None where the targets are numbers"""
    channels_last: bool = False
    """whether x is stored as (sample, height, width, channel), which is fast to index and for convolutions"""
    unseen: frozenset[str] = frozenset()
    """names of the clients that take no part in training"""
    title: str = ""
    """name of the data in tables"""
    notes: tuple[str, ...] = ()
    """remarks about the data for the user"""
    streams_to: torch.device | None = None
    """device to which gathered samples are copied, where not all of them fit on it"""
    origin: str = ""
    """settings that the data were made with, apart from the seed, as text; empty for a user's own data"""
    pixels: torch.dtype | None = None
    """number format of the inputs if x holds their pixels as bytes, to be divided by 255; None if x holds the inputs"""
    chronological: bool = False
    """whether each client's samples are in the order of time, so that neighbours are alike"""
    shared_inputs: tuple[int, ...] = ()
    """inputs whose coefficients are in truth the same for all clients; none where that is not known"""
    series: SeriesFacts | None = None
    """the time series that the samples are windows of, and their scales, if they are"""
    normalize: tuple[float, float] = (0.0, 1.0)
    """mean that was subtracted from the inputs, and deviation by which they were divided"""

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise EquipoiseError(f"two clients are named {twice!r}; every client needs a different name")
        assert len(self.names) == len(self.train)
        if len(empty := np.flatnonzero(self.train.lengths == 0)):
            raise EquipoiseError(
                f"client {self.names[empty[0]]!r} has no training samples; give it some, leave it out, or use fewer "
                "clients"
            )
        if self.names and len(self.unseen) >= len(self.names):
            raise EquipoiseError("all clients are unseen; at least one must take part in training")

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        sizes = (f"{len(getattr(self, split).flat)} {split}" for split in SPLITS)
        kinds = (f"{what} {list(t.shape[1:])} {str(t.dtype).removeprefix('torch.')}" for what, t in self._arrays())
        unseen = f", {len(self.unseen)} of them unseen" if self.unseen else ""
        title = f"{self.title}: " if self.title else ""
        return f"Federation({title}{len(self)} clients{unseen}; samples: {', '.join(sizes)}; {', '.join(kinds)})"

    def _arrays(self) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
        return ("x", self.gather(torch.zeros(0, dtype=torch.int64))[0]), ("y", self.y)

    @cached_property
    def numbers(self) -> dict[int, int]:
        """Return the number by which the server knows each client: in the order of names, training clients first."""
        training, unseen = self.by_name
        return {who: number for number, who in enumerate([*training, *unseen])}

    @cached_property
    def by_name(self) -> tuple[list[int], list[int]]:
        """Return the indices of the clients that train, and of the unseen ones, each in the order of their names."""
        order = sorted(range(len(self)), key=self.names.__getitem__)
        if not self.unseen:
            return order, []
        training = [i for i in order if self.names[i] not in self.unseen]
        return training, [i for i in order if self.names[i] in self.unseen]

    @cached_property
    def finite(self) -> bool:
        """Tell whether there is no NaN and no infinity in any sample; found once per federation, without a copy."""
        return State(x=self.x, y=self.y).finite()

    @property
    def outputs(self) -> int:
        """Return the number of outputs that a model must have for a sample (or for each position in it)."""
        return self.classes or self.y[0].numel()

    def holding_out(self, fraction: float, seed: int) -> "Federation":
        """Return the federation with this fraction of the clients, drawn from the seed, excluded from training."""
        if not fraction:
            return self
        names = sorted(self.names)
        count = max(1, round(fraction * len(names)))
        chosen = randomness.generator(seed, "unseen").choice(len(names), count, replace=False)
        return replace(self, unseen=frozenset(names[i] for i in chosen))

    def keeping(self, only: Sequence[str] | None) -> "Federation":
        """Return the federation with only the clients of these names; None keeps all."""
        if only is None:
            return self
        for name in only:
            if name not in self.names:
                raise EquipoiseError(f"data.only names {name!r}, which is not a client{nearest(name, self.names)}")
        kept = [i for i, name in enumerate(self.names) if name in set(only)]
        train, validation, test = (
            RaggedIndices([s[i] for i in kept]) for s in (self.train, self.validation, self.test)
        )
        names = tuple(self.names[i] for i in kept)
        return replace(self, names=names, train=train, validation=validation, test=test, origin="")

    def training_on(self, most: int | None, seed: int) -> "Federation":
        """Return the federation with at most this number of training samples per client, drawn from the seed."""
        if most is None:
            return self
        kept = []
        for i, name in enumerate(self.names):
            own = self.train[i]
            drawn = randomness.generator(seed, "most", name).permutation(len(own))[:most]
            kept.append(own[np.sort(drawn)])
        return replace(self, train=RaggedIndices(kept), origin="")

    def called(self, title: str, notes: tuple[str, ...] = ()) -> "Federation":
        """Return the federation with this title and these notes."""
        return replace(self, title=title, notes=notes)

    @cached_property
    def _copies(self) -> dict[tuple[torch.device, str], "Federation"]:
        return {}

    def placed(self, device: torch.device, where: Literal["auto", "device", "host"] = "auto") -> "Federation":
        """Return the federation with its samples on a device or, if they do not fit there, streamed to it.

        Args:
            device: where models are trained.
            where: whether all samples are copied to the device, once, or stay on the host; "auto": as memory allows.
        """
        if device == self.x.device:
            return self
        if (device, where) not in self._copies:
            if where == "host" or (where == "auto" and not has_room(device, self.x.nbytes + self.y.nbytes)):
                placed = replace(self, streams_to=device)
            else:
                placed = replace(self, x=self.x.to(device), y=self.y.to(device))
            self._copies[device, where] = placed
        return self._copies[device, where]

    def index(self, indices: np.ndarray) -> Tensor:
        """Return indices of samples as `gather` needs them, where the samples are."""
        return torch.from_numpy(indices).to(self.x.device)

    def gather(self, indices: Tensor, memory: BatchBuffer | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these samples; with `memory`, the inputs are valid until its next use."""
        if self.streams_to is not None:
            return self._streamed(indices, self.streams_to)
        return self.inputs(indices, memory), self.targets(indices)

    def inputs(self, indices: Tensor, memory: BatchBuffer | None = None) -> Tensor:
        """Return the inputs of these samples; with `memory`, they are valid until its next use."""
        return self._converted(self._selected(indices.to(self.x.device), memory), memory)

    def targets(self, indices: Tensor) -> Tensor:
        """Return the targets of these samples."""
        return self.y.index_select(0, indices.to(self.y.device))

    def _streamed(self, indices: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gather samples in memory from which they are copied while the host goes on, if the device allows that."""
        pinned = device.type == "cuda"
        # Always new memory: torch keeps that of the last batch until its copy is complete.
        x, y = self._selected(indices, PinnedMemory() if pinned else None), self.targets(indices)
        y = y.pin_memory() if pinned else y
        return self._converted(x.to(device, non_blocking=True), None), y.to(device, non_blocking=True)

    def _selected(self, indices: Tensor, memory: BatchBuffer | None) -> Tensor:
        out = None if memory is None else memory.take(len(indices), self.x.shape[1:], self.x.dtype, self.x.device)
        return torch.index_select(self.x, 0, indices, out=out)

    def _converted(self, x: Tensor, memory: BatchBuffer | None) -> Tensor:
        """Return inputs from what x holds of them: pixels as bytes, or with their channels last."""
        if self.pixels is not None:
            room = None if memory is None else memory.take(len(x), x.shape[1:], self.pixels, x.device)
            x = from_bytes(x, self.pixels, room)
        return x.permute(0, 3, 1, 2) if self.channels_last else x

    def stored_inputs(self) -> Iterator[np.ndarray]:
        """Yield the inputs of all samples some at a time, in the memory layout of x, as numbers if x holds pixels."""
        if self.pixels is None:
            yield np.ascontiguousarray(self.x.numpy())
            return
        for part in self.x.split(_CHUNK):
            yield from_bytes(part, self.pixels).numpy()

    def packed(self) -> "Federation":
        """Return the federation with pixels as bytes, if the inputs are bytes that were divided by 255."""
        found = None if self.pixels is not None else to_bytes(self.x)
        return self if found is None else replace(self, x=found, pixels=self.x.dtype)

    @cached_property
    def unpacked(self) -> "Federation":
        """Return the federation with the inputs themselves in x."""
        if self.pixels is None:
            return self
        return replace(self, x=from_bytes(self.x, self.pixels), pixels=None)

    def fingerprint(self, splits: bool = False) -> str:
        """Return a hash of all samples and the clients' names in order; with `splits`, also of who owns which."""
        hasher = blake2b("\n".join([*self.names, "", *sorted(self.unseen)]).encode(), digest_size=8)
        shares = [s.flat for s in (self.train, self.validation, self.test)] if splits else []
        for array in chain(self.stored_inputs(), (self.y.numpy(), *shares)):
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()

    def problem(self) -> str:
        """Return a hash that is the same for runs that differ only in the seed.

        Data that were loaded by name are known by their settings: the seed may have chosen the clients, or drawn the
        samples. A user's own data are known by each client's samples, in any order and however they are split, and by
        the sizes of the split. Which clients are unseen is drawn from the seed.
        """
        hasher = blake2b(f"{self.origin}\n{len(self)}\n".encode(), digest_size=8)
        if not self.origin:
            y = np.ascontiguousarray(self.y.numpy())
            for i in sorted(range(len(self)), key=lambda i: self.names[i]):
                parts = [getattr(self, split)[i] for split in SPLITS]
                rows = np.concatenate(parts)
                own = self.x[torch.from_numpy(rows)]
                x = (own if self.pixels is None else from_bytes(own, self.pixels)).numpy()
                total = sum(_row_digest(each, y[row]) for each, row in zip(x, rows, strict=True)) % 2**64
                hasher.update(f"{self.names[i]}\n{[len(part) for part in parts]} {total}\n".encode())
        return hasher.hexdigest()

    def sample(self) -> tuple[Tensor, Tensor]:
        """Return two samples, to probe a model with."""
        return self.gather(torch.from_numpy(np.resize(self.train[0], 2)))

    def prepared(self, dtype: torch.dtype, channels_last: bool) -> "Federation":
        """Return the federation in the dtype and the memory layout in which the model is trained."""
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (self.x, self.y))
        packed = (self if self.x.dtype == torch.float32 else replace(self, x=x)).packed()
        x = x if packed.pixels is None else packed.x
        channels_last = channels_last and x.ndim == 4 and not self.channels_last
        x = x.permute(0, 2, 3, 1).contiguous() if channels_last else x.contiguous()
        pixels = None if packed.pixels is None else dtype
        return replace(self, x=x, y=y, channels_last=channels_last or self.channels_last, pixels=pixels)


def _row_digest(x: np.ndarray, y: np.ndarray) -> int:
    return int.from_bytes(blake2b(x.tobytes() + y.tobytes(), digest_size=8).digest(), "little")


def check_split(split: Sequence[float]) -> None:
    """Raise an error unless these are three fractions that sum to 1, the first above 0."""
    try:
        good = len(split) == 3 and min(split) >= 0 and split[0] > 0 and abs(sum(split) - 1) <= 1e-6
    except TypeError:  # not a list, or not of numbers
        good = False
    if not good:
        shown = list(split) if isinstance(split, (tuple, list)) else split
        raise EquipoiseError(
            f"data.split = {shown!r} is not allowed; it must be three fractions "
            "(train, validation, test) that sum to 1, the first above 0"
        )


def split_sizes(n: int, fractions: Sequence[float]) -> tuple[int, int, int]:
    """Return how many of n samples are for training, validation and test; training gets at least one."""
    validation, test = (round(n * f) for f in fractions[1:])
    while n and validation + test >= n:  # tiny clients: training has priority
        validation, test = (validation - 1, test) if validation else (validation, test - 1)
    return n - validation - test, validation, test


def split_client(indices: np.ndarray, fractions: Sequence[float], rng: np.random.Generator) -> list[np.ndarray]:
    """Split one client's samples at random into train, validation and test; training gets at least one."""
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
    """Create a federation from every client's share of a pool.

    Args:
        x: inputs of all samples.
        y: targets of all samples.
        shares: indices of each client's samples, by the client's name.
        split: fractions of training, validation and test samples.
        seed: seed of the split, which depends on it and on the client's name only.
        classes: number of labels; None where the targets are numbers.
        part: 0, 1 or 2 for each sample (train, validation, test), in place of a random split.

    Returns:
        The federation.
    """
    if part is None:
        parts = [split_client(share, split, randomness.generator(seed, "split", n)) for n, share in shares.items()]
    else:
        parts = [[share[part[share] == k] for k in range(3)] for share in shares.values()]
    train, validation, test = (RaggedIndices([part[k] for part in parts]) for k in range(3))
    return Federation(x, y, tuple(shares), train, validation, test, classes)


def from_clients(
    clients: Sequence[Any] | Mapping[Any, Any],
    *,
    names: Sequence[str] | None = None,
    split: Sequence[float] = SPLIT,
    seed: int = 0,
) -> Federation:
    """Create a federation from one entry per client.

    Args:
        clients: a list, or a dictionary by name, with an entry for each client: a pair of arrays (x, y), a torch
            Dataset of such pairs, or a dictionary with either of these under "train" and optionally "validation" and
            "test". Only such a dictionary is taken as already split.
        names: the names of clients in a list; by default client-0, client-1 and so on.
        split: fractions of training, validation and test samples, for entries that are not split yet.
        seed: the seed of the split.

    Returns:
        The federation.
    """
    check_split(split)
    names, clients = named_clients(clients, names)
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    columns: list[list[np.ndarray]] = [[], [], []]
    count = 0

    def take(part: Any, name: str) -> np.ndarray:
        nonlocal count
        x, y = as_pair(part, name)
        xs.append(x)
        ys.append(y)
        count += len(x)
        return np.arange(count - len(x), count)

    for name, client in zip(names, clients, strict=True):
        if isinstance(client, Mapping):
            unknown = set(client) - set(SPLITS)
            if unknown or "train" not in client:
                raise EquipoiseError(
                    f"client {name!r} has the parts {sorted(client)}; it needs 'train', and may have 'validation' and "
                    "'test'"
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
