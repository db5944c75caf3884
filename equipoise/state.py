"""States and messages: dictionaries of tensors, and the uploads of a round."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from equipoise.torch_device import wide_dtype, widened

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

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a field of all messages, one row each, some coordinates at a time so that memory stays small."""
        size, width = self.like[name].numel(), max(1, _BLOCK_BYTES // (8 * len(self)))
        for low in range(0, max(size, 1), width):
            yield self.columns(name, low, min(low + width, size))

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
        return self.each(lambda rows: torch.tensordot(weights.to(rows.dtype), rows, dims=1))


def equal_weights(uploads: Uploads) -> Tensor:
    """Return weights of the messages that are equal and sum to one, on the device of the messages."""
    device = next((t.device for t in uploads.like.values()), torch.device("cpu"))
    return torch.full((len(uploads),), 1 / len(uploads), dtype=wide_dtype(device), device=device)


@dataclass(frozen=True)
class RoundUploads(Uploads):
    """The accepted uploads of a round."""

    who: tuple[int, ...]
    items: tuple[Upload, ...]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return self.items

    @property
    def like(self) -> State:
        return self.uploads[0].message

    def mean(self) -> State:
        return self.combined(equal_weights(self))

    def weights(self) -> Tensor:
        given = [u.weight for u in self.uploads if u.weight is not None]
        if len(given) < len(self.uploads):
            return equal_weights(self)
        weights = widened(torch.cat(given))
        if not torch.isfinite(weights.sum()):  # each is finite, their sum is not
            weights = weights / weights.max()
        return weights / weights.sum()

    def columns(self, name: str, low: int, high: int) -> Tensor:
        return torch.stack([u.message[name].flatten()[low:high] for u in self.uploads])

    def only(self, *names: str) -> "RoundUploads":
        chosen = (Upload(State({k: u.message[k] for k in names})) for u in self.uploads)
        return RoundUploads(self.who, tuple(chosen))
