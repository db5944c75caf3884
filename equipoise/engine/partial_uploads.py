"""The uploads of a round of which only some are in this process."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from equipoise.distributed.placement import Placement
from equipoise.state import State, Upload, UploadsOfRound, equal_shares, shares_of


@dataclass(frozen=True)
class PartialUploads(UploadsOfRound):
    """The accepted uploads of a round, each in the process that its client belongs to.

    Means need only the sums of each process. Rules that look at single coordinates or messages exchange all of them.
    """

    who: tuple[int, ...]
    items: Mapping[int, Upload]
    "the uploads in this process, by the clients' numbers"
    sent_weights: Tensor | None
    "the weights of all clients, in the order of `who`"
    example: State
    "a message with the fields and shapes of all of them"
    placement: Placement

    def __len__(self) -> int:
        return len(self.who)

    @property
    def own(self) -> Iterator[tuple[int, Upload]]:
        yield from ((who, self.items[who]) for who in self.who if who in self.items)

    @cached_property
    def uploads(self) -> tuple[Upload, ...]:
        tensors = {f"{who} {name}": t for who, upload in self.own for name, t in upload.message.items()}
        messages = {who: State() for who in self.who}
        for part in self.placement.ranks.gather(tensors):
            for key, t in part.items():
                who, name = key.split(" ", 1)
                messages[int(who)][name] = t.to(self.example[name].device)
        weights = [None] * len(self) if self.sent_weights is None else [w[None] for w in self.sent_weights]
        return tuple(Upload(messages[who], weight=w) for who, w in zip(self.who, weights, strict=True))

    @property
    def like(self) -> State:
        return self.example

    @property
    def weighted(self) -> bool:
        return self.sent_weights is not None

    def weights(self) -> Tensor:
        return equal_shares(len(self), self.example) if self.sent_weights is None else shares_of(self.sent_weights)

    def columns(self, name: str, low: int, high: int) -> Tensor:
        own = [upload.message[name].flatten()[low:high] for _, upload in self.own]
        return self.placement.rows(own, self.example[name].flatten()[low:high])

    def weighing(self, weights: Tensor) -> "PartialUploads":
        return replace(self, sent_weights=weights)

    def only(self, *names: str) -> "PartialUploads":
        def chosen(state: State) -> State:
            return State({k: state[k] for k in names})

        items = {who: Upload(chosen(upload.message)) for who, upload in self.own}
        return replace(self, items=items, sent_weights=None, example=chosen(self.example))


def example_message(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> State:
    """Return a message of zeros with these shapes."""
    return State({k: torch.zeros(shape, dtype=dtype, device=device) for k, (shape, dtype) in shapes.items()})
