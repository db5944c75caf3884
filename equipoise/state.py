"""The four dictionaries of tensors: server state, client state, message down, message up."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

_BLOCK_BYTES = 64 << 20  # of all messages' same coordinates, when they are looked at side by side


class State(dict[str, Tensor]):
    """Named tensors, read as attributes. Treated as immutable: an algorithm returns a new one.

    Every tensor has at least one axis (a scalar is a vector of length one), so that a stack of clients
    is the same thing with one more axis in front, and arithmetic broadcasts.
    """

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this state holds {sorted(self)}, not {name!r}") from None

    @property
    def nbytes(self) -> int:
        return sum([t.nbytes for t in self.values()])

    @property
    def numel(self) -> int:
        return sum(t.numel() for t in self.values())

    def row(self, i: int) -> "State":
        """Client i's part of a stack."""
        return State({name: t[i] for name, t in self.items()})

    def finite(self) -> bool:
        """No NaN and no infinity anywhere; one pass, no copy (NaN spreads through minimum and maximum)."""
        ends = [m for t in self.values() if t.numel() and t.is_floating_point() for m in torch.aminmax(t)]
        if len({m.dtype for m in ends}) > 1:
            ends = [m.double() for m in ends]
        return all(map(isfinite, torch.stack(ends).tolist())) if ends else True

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(t.shape), t.dtype) for name, t in self.items()}


def stack(states: Sequence[State]) -> State:
    """Many clients' states as one with a leading axis; what all of them share is expanded, not copied."""
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

    def get(self, client: int) -> State: ...


@dataclass(frozen=True)
class Upload:
    """What a client sends.

    `message` is the quantity the paper sends; `reference` what both sides already hold of it (attacks act
    on the quantity, clipping and noise on its difference from the reference; it does not travel); `weight`
    the client's weight in the average, which travels if it is there.
    """

    message: State = field(default_factory=State)
    reference: State | None = None
    weight: Tensor | None = None

    def row(self, i: int) -> "Upload":
        return Upload(
            self.message.row(i),
            None if self.reference is None else self.reference.row(i),
            None if self.weight is None else self.weight[i],
        )

    @property
    def wire(self) -> State:
        """Exactly what travels."""
        return self.message if self.weight is None else State(self.message, weight=self.weight)


@dataclass(frozen=True)
class Uploads:
    """The accepted uploads of a round, in the order of the clients' names, with who sent each."""

    who: tuple[int, ...]
    uploads: tuple[Upload, ...]

    def __len__(self) -> int:
        return len(self.uploads)

    @property
    def like(self) -> State:
        """A message, for its fields and shapes."""
        return self.uploads[0].message

    def columns(self, name: str, low: int, high: int) -> Tensor:
        """Coordinates low to high of a field, a row a message."""
        return torch.stack([u.message[name].flatten()[low:high] for u in self.uploads])

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A field of all messages, a row each, some coordinates at a time so that memory stays small."""
        size, width = self.like[name].numel(), max(1, _BLOCK_BYTES // (8 * len(self)))
        for low in range(0, max(size, 1), width):
            yield self.columns(name, low, min(low + width, size))

    def combined(self, weights: Tensor) -> State:
        """The sum of all messages, each times its weight."""
        return self.each(lambda rows: torch.tensordot(weights.to(rows.dtype), rows, dims=1))

    def mean(self) -> State:
        return self.combined(torch.full((len(self),), 1 / len(self), dtype=torch.float64))

    def each(self, function: Callable[[Tensor], Tensor]) -> State:
        """A message made by a function that takes rows of coordinates to one row."""
        return State(
            {
                name: torch.cat([function(rows) for rows in self.blocks(name)]).reshape(t.shape)
                for name, t in self.like.items()
            }
        )

    def only(self, *names: str) -> "Uploads":
        """Some fields of all messages, in which every client counts once."""
        chosen = (Upload(State({k: u.message[k] for k in names})) for u in self.uploads)
        return Uploads(self.who, tuple(chosen))

    def weights(self) -> Tensor:
        """Weights that sum to one; equal where the algorithm sends none."""
        given = [u.weight for u in self.uploads if u.weight is not None]
        if len(given) < len(self.uploads):
            return torch.full((len(self),), 1 / len(self), dtype=torch.float64)
        weights = torch.cat(given).double()
        if not torch.isfinite(weights.sum()):  # each is finite, their sum is not
            weights = weights / weights.max()
        return weights / weights.sum()
