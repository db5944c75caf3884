"""The last message of every client, for algorithms whose server uses them all, whoever takes part in a round.

Messages lie with the clients' states in the store, on disk when they are many. In memory is their sum: a round changes
it by what its own messages differ from those before them, so that a mean over all clients costs no more than one over
the round. In a mean, who has not been heard of yet counts with the message that all begin with; other rules look at
those who have been heard of.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from equipoise.executors.base import SENT
from equipoise.state import State, Upload, Uploads

_HUGE = 1e4  # times what is left in the sum: the error of float64 is then below 1e-12 of it


class UploadStore(Protocol):
    """A store of clients' states."""

    def get(self, who: int) -> State: ...

    def part(self, who: int, name: str, low: int, high: int) -> Tensor: ...


class LastUploadTracker:
    def __init__(self, first: State, clients: int):
        self.first, self.clients = first, clients
        self.heard: set[int] = set()
        self.total = State({name: clients * t.double() for name, t in first.items()})
        "of all messages; in float64, so that rounding does not add up over the rounds"

    @property
    def initial(self) -> State:
        """What the store keeps for a client before it is heard of."""
        return State({SENT + name: t for name, t in self.first.items()})

    def with_round(self, uploads: Uploads, store: UploadStore) -> "LastUploads":
        """All last messages, those of the round in the place of the ones before."""
        total = State({name: t.clone() for name, t in self.total.items()})
        heard, largest = set(self.heard), 0.0
        for who, upload in zip(uploads.who, uploads.uploads, strict=True):
            newcomer = who not in heard and len(heard) >= self.clients  # more than were announced: all count
            heard.add(who)
            for name, t in upload.message.items():
                total[name] += t
                if not newcomer:
                    before = store.get(who)[SENT + name]
                    total[name] -= before
                    largest = max(largest, float(before.abs().max()) if before.numel() else 0.0)
        everyone = LastUploads(uploads.who, uploads.uploads, self, store, tuple(sorted(heard)), total)
        left = max((float(t.abs().max()) for t in total.values() if t.numel()), default=0.0)
        # Beside a huge number the others were rounded away; when it leaves, the sum is made anew.
        return everyone.summed() if largest > _HUGE * left else everyone

    def take(self, everyone: "LastUploads") -> dict[int, State]:
        """The round is done: its messages are now the last ones. What the store is to keep of each who sent one."""
        self.heard, self.total = set(everyone.heard), everyone.total
        return {
            who: State({SENT + name: t for name, t in upload.message.items()}) for who, upload in everyone.fresh.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {
            "last.heard": torch.tensor(sorted(self.heard), dtype=torch.int64),
            **{f"last.total.{name}": t for name, t in self.total.items()},
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.heard = set(tensors["last.heard"].tolist())
        self.total = State({name: tensors[f"last.total.{name}"] for name in self.first})


@dataclass(frozen=True)
class LastUploads(Uploads):
    """The last message of every client. Rows are those of the clients that have been heard of, by their numbers."""

    last: LastUploadTracker
    store: UploadStore
    heard: tuple[int, ...]
    total: State

    @cached_property
    def fresh(self) -> dict[int, Upload]:
        return dict(zip(self.who, self.uploads, strict=True))

    def __len__(self) -> int:
        return len(self.heard)

    @property
    def clients(self) -> int:
        """How many count in the mean."""
        return max(self.last.clients, len(self.heard))

    def columns(self, name: str, low: int, high: int) -> Tensor:
        return torch.stack(
            [
                self.fresh[who].message[name].flatten()[low:high]
                if who in self.fresh
                else self.store.part(who, SENT + name, low, high)
                for who in self.heard
            ]
        )

    def mean(self) -> State:
        return State({name: (t / self.clients).to(self.like[name].dtype) for name, t in self.total.items()})

    def summed(self) -> "LastUploads":
        """With the sum made anew, from all messages."""
        total = self.each(lambda rows: rows.double().sum(0))
        unheard = self.clients - len(self)
        return replace(self, total=State({name: t + unheard * self.last.first[name] for name, t in total.items()}))

    def weights(self) -> Tensor:
        return torch.full((len(self),), 1 / len(self), dtype=torch.float64)
