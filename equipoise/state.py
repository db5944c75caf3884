"""States and messages: dictionaries of tensors, and the uploads of a round."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from equipoise.distributed.placement import Placement
from equipoise.distributed.shards import ClientShards
from equipoise.torch_device import CPU, wide_dtype, widened

_BLOCK_BYTES = 64 << 20  # memory for the same coordinates of all messages


class State(dict[str, Tensor]):
    """Named tensors, read as attributes. Treated as immutable: an algorithm returns a new one.

    Every tensor has at least one axis (a scalar is a vector of length one), so that a stack of clients has the same
    fields with one more axis in front, and arithmetic broadcasts.
    """

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this state holds {sorted(self)}, not {name!r}") from None

    def __repr__(self) -> str:
        fields = (f"{name}: {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in self.items())
        return f"State({', '.join(fields)})"

    @property
    def nbytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum([t.nbytes for t in self.values()])

    @property
    def numel(self) -> int:
        """Return the number of numbers."""
        return sum(t.numel() for t in self.values())

    def row(self, i: int) -> "State":
        """Return client i's part of a stack."""
        return State({name: t[i] for name, t in self.items()})

    def finite(self) -> bool:
        """Tell whether there is no NaN and no infinity; one pass, no copy (NaN spreads through minimum and maximum)."""
        ends = [m for t in self.values() if t.numel() and t.is_floating_point() for m in torch.aminmax(t)]
        if len({m.dtype for m in ends}) > 1:
            ends = [widened(m) for m in ends]
        return all(map(isfinite, torch.stack(ends).tolist())) if ends else True

    def to(self, device: torch.device) -> "State":
        """Return the same numbers on a device; the state itself if they are there already."""
        if all(t.device == device for t in self.values()):
            return self
        return State({name: t.to(device) for name, t in self.items()})

    def digest(self) -> str:
        """Return a hash of all numbers."""
        hasher = blake2b(digest_size=16)
        for name, t in self.items():
            hasher.update(name.encode() + t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and number format of each tensor."""
        return {name: (tuple(t.shape), t.dtype) for name, t in self.items()}


def stack(states: Sequence[State]) -> State:
    """Stack many clients' states into one with a leading axis; what all of them share is expanded, not copied."""
    first = states[0]
    return State(
        {
            name: t.expand(len(states), *t.shape)
            if all(other[name] is t for other in states)
            else torch.stack([other[name] for other in states])
            for name, t in first.items()
        }
    )


class ClientStates(Protocol):
    """The states of clients, by their numbers."""

    def get(self, client: int) -> State:
        """Return the state of a client."""
        ...


@dataclass(frozen=True)
class Upload:
    """What a client sends."""

    message: State = field(default_factory=State)
    "the quantity that the paper sends; attacks change it"
    reference: State | None = None
    "what both sides already know of it; clipping and noise act on the difference, and it is not sent"
    weight: Tensor | None = None
    "the client's weight in the average; it is sent too, if there is one"

    def row(self, i: int) -> "Upload":
        """Return the upload of client i of a stack."""
        return Upload(
            self.message.row(i),
            None if self.reference is None else self.reference.row(i),
            None if self.weight is None else self.weight[i],
        )

    @property
    def wire(self) -> State:
        """Return exactly what is sent."""
        return self.message if self.weight is None else State(self.message, weight=self.weight)


class Uploads(ABC):
    """Uploads that are combined into one message.

    Which uploads these are depends on the algorithm and on privacy: those of the round (`RoundUploads`), the last ones
    of all clients (`LastUploads`), or those of which only a noised mean may be seen (`NoisedMeanUploads`).
    """

    who: tuple[int, ...]
    "numbers of the clients that took part in the round, in the order of their names"

    @property
    def senders(self) -> tuple[int, ...]:
        """Return the numbers of the clients whose messages are combined, one for each row."""
        return self.who

    @property
    def sent(self) -> int:
        """Return the number of messages that clients sent, where rows may be mixtures of several."""
        return len(self)

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of messages that are combined."""

    @property
    @abstractmethod
    def uploads(self) -> tuple[Upload, ...]:
        """Return the uploads of the round one by one, in the order of `who`; refused where they are private."""

    @property
    @abstractmethod
    def like(self) -> State:
        """Return a message with the fields and shapes of all of them."""

    @property
    @abstractmethod
    def weighted(self) -> bool:
        """Tell whether the clients sent weights."""

    @abstractmethod
    def mean(self) -> State:
        """Return the mean of all messages, each counting once."""

    @abstractmethod
    def weights(self) -> Tensor:
        """Return weights of the messages that sum to one; equal where the algorithm sends none."""

    @abstractmethod
    def columns(self, name: str, low: int, high: int) -> Tensor:
        """Return coordinates low to high of a field, one row per message."""

    @abstractmethod
    def only(self, *names: str) -> "Uploads":
        """Return the same uploads with these fields only, every client counting once."""

    def weighing(self, weights: Tensor) -> "Uploads":
        """Return the same messages with other weights, one for each, as if clients had sent them."""
        raise TypeError(f"{type(self).__name__} are combined with equal weights")

    def spans(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield the first coordinate of each block of a field, and the first one after it; a block fits into memory."""
        size, width = self.like[name].numel(), max(1, _BLOCK_BYTES // (8 * len(self)))
        for low in range(0, max(size, 1), width):
            yield low, min(low + width, size)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a field of all messages, one row each, some coordinates at a time so that memory stays small."""
        for low, high in self.spans(name):
            yield self.columns(name, low, high)

    def each(self, function: Callable[[Tensor], Tensor]) -> State:
        """Return the message that a function from rows of coordinates to one row makes."""
        return State(
            {
                name: torch.cat([function(rows) for rows in self.blocks(name)]).reshape(t.shape)
                for name, t in self.like.items()
            }
        )

    def combined(self, weights: Tensor) -> State:
        """Return the sum of all messages, each times its weight."""
        return self.each(lambda rows: torch.tensordot(weights.to(rows), rows, dims=1))


class UploadsOfRound(Uploads):
    """Base of the uploads of a round, whether all of them or only some are in this process."""

    placement: Placement

    @property
    @abstractmethod
    def own(self) -> Iterator[tuple[int, Upload]]:
        """Yield the uploads that are in this process, each with its client's number."""

    @abstractmethod
    def only(self, *names: str) -> "UploadsOfRound": ...

    def mean(self) -> State:
        return self.combined(equal_shares(len(self)))

    def combined(self, weights: Tensor) -> State:
        """Return the sum of all messages, each times its weight, in an order that depends on the shards only."""
        weight = dict(zip(self.who, weights.tolist(), strict=True))
        device = next(iter(self.like.values())).device
        total = self.placement.total(((who, upload.message, weight[who]) for who, upload in self.own), device)
        return State(total or {})


_ONE_PROCESS = Placement(ClientShards(1, count=1))


@dataclass(frozen=True)
class RoundUploads(UploadsOfRound):
    """The accepted uploads of a round."""

    who: tuple[int, ...]
    items: tuple[Upload, ...]
    placement: Placement = _ONE_PROCESS
    "the order in which they are summed; other processes have the same uploads"

    def __len__(self) -> int:
        return len(self.items)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return self.items

    @property
    def own(self) -> Iterator[tuple[int, Upload]]:
        yield from zip(self.who, self.items, strict=True)

    @property
    def like(self) -> State:
        return self.uploads[0].message

    @property
    def weighted(self) -> bool:
        return any(u.weight is not None for u in self.items)

    def weights(self) -> Tensor:
        given = [u.weight for u in self.uploads if u.weight is not None]
        return shares_of(torch.cat(given)) if len(given) == len(self) else equal_shares(len(self), self.like)

    def columns(self, name: str, low: int, high: int) -> Tensor:
        return torch.stack([u.message[name].flatten()[low:high] for u in self.uploads])

    def weighing(self, weights: Tensor) -> "RoundUploads":
        pairs = zip(self.uploads, weights.split(1), strict=True)
        return replace(self, items=tuple(replace(upload, weight=weight) for upload, weight in pairs))

    def only(self, *names: str) -> "RoundUploads":
        chosen = (Upload(State({k: u.message[k] for k in names})) for u in self.uploads)
        return RoundUploads(self.who, tuple(chosen), self.placement)


def shares_of(weights: Tensor) -> Tensor:
    """Return weights that sum to one, in float64."""
    weights = widened(weights)
    if not torch.isfinite(weights.sum()):  # each is finite, their sum is not
        weights = weights / weights.max()
    return weights / weights.sum()


def equal_shares(count: int, like: State | None = None) -> Tensor:
    """Return equal weights that sum to one, in float64; on the device of the message `like`, if it is given."""
    device = next((t.device for t in (like or {}).values()), CPU)
    return torch.full((count,), 1 / count, dtype=wide_dtype(device), device=device)
