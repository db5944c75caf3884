"""The last upload of every client, for algorithms whose server combines all of them in every round.

The uploads are stored with the clients' states, on disk when there are many. Only their sum is in memory: a round
changes it by the difference between its uploads and those before, so that a mean over all clients costs no more than a
mean over the round. In the mean, a client that has never taken part counts with the initial upload; robust rules see
only clients that have.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from equipoise.executors.base import SENT
from equipoise.state import State, Upload, Uploads, equal_weights
from equipoise.torch_device import widened

_HUGE = 1e4  # times what is left in the sum: the error of float64 is then below 1e-12 of it


class UploadStore(Protocol):
    """A store of clients' states, which include their last uploads."""

    def get(self, who: int) -> State:
        """Return the state of a client."""
        ...

    def part(self, who: int, name: str, low: int, high: int) -> Tensor:
        """Return coordinates low to high of one tensor of a client's state."""
        ...


class LastUploadTracker:
    """Which clients have taken part, and the sum of all last uploads."""

    def __init__(self, first: State, clients: int):
        """Begin a run.

        Args:
            first: upload assumed for clients that have not taken part yet.
            clients: number of clients.
        """
        self.first, self.clients = first, clients
        self.known: set[int] = set()
        "numbers of the clients that have taken part"
        self.total = State({name: clients * widened(t) for name, t in first.items()})
        "sum of all last uploads, in float64 so that rounding errors do not add up over the rounds"

    @property
    def initial(self) -> State:
        """Return what the store keeps for a client that has not taken part yet."""
        return State({SENT + name: t for name, t in self.first.items()})

    def with_round(self, uploads: Uploads, store: UploadStore) -> "LastUploads":
        """Return the last uploads of all clients, with those of the round in place of the ones before."""
        total = State({name: t.clone() for name, t in self.total.items()})
        known, largest = set(self.known), 0.0
        for who, upload in zip(uploads.who, uploads.uploads, strict=True):
            newcomer = who not in known and len(known) >= self.clients  # more than were announced: all count
            known.add(who)
            for name, t in upload.message.items():
                total[name] += t
                if not newcomer:
                    before = store.get(who)[SENT + name].to(t.device)
                    total[name] -= before
                    largest = max(largest, float(before.abs().max()) if before.numel() else 0.0)
        everyone = LastUploads(
            uploads.who, uploads.uploads, store, tuple(sorted(known)), total, self.first, self.clients
        )
        left = max((float(t.abs().max()) for t in total.values() if t.numel()), default=0.0)
        # Beside a huge number the others were rounded away; when it leaves, the sum is computed again.
        return everyone.summed() if largest > _HUGE * left else everyone

    def take(self, everyone: "LastUploads") -> dict[int, State]:
        """Finish a round: its uploads are now the last ones. Return what the store is to keep of each."""
        self.known, self.total = set(everyone.known), everyone.total
        return {
            who: State({SENT + name: t for name, t in upload.message.items()}) for who, upload in everyone.fresh.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        return {
            "last.heard": torch.tensor(sorted(self.known), dtype=torch.int64),
            **{f"last.total.{name}": t for name, t in self.total.items()},
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what was saved."""
        self.known = set(tensors["last.heard"].tolist())
        self.total = State({name: tensors[f"last.total.{name}"].to(t.device) for name, t in self.first.items()})


@dataclass(frozen=True)
class LastUploads(Uploads):
    """The last upload of every client. Rows are those of the clients that have taken part, by their numbers."""

    who: tuple[int, ...]
    items: tuple[Upload, ...]
    "the uploads of the round"
    store: UploadStore
    known: tuple[int, ...]
    "numbers of the clients that have taken part"
    total: State
    "sum over all clients"
    first: State
    "upload assumed for the others"
    announced: int
    "number of clients that were announced"

    @cached_property
    def fresh(self) -> dict[int, Upload]:
        """Return the uploads of the round by the clients' numbers."""
        return dict(zip(self.who, self.uploads, strict=True))

    def __len__(self) -> int:
        return len(self.known)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return self.items

    @property
    def clients(self) -> int:
        """Return the number of clients that count in the mean."""
        return max(self.announced, len(self.known))

    @property
    def like(self) -> State:
        return self.uploads[0].message

    def mean(self) -> State:
        return State({name: (t / self.clients).to(self.like[name].dtype) for name, t in self.total.items()})

    def weights(self) -> Tensor:
        return equal_weights(self)

    def columns(self, name: str, low: int, high: int) -> Tensor:
        return torch.stack(
            [
                self.fresh[who].message[name].flatten()[low:high]
                if who in self.fresh
                else self.store.part(who, SENT + name, low, high).to(self.first[name].device)
                for who in self.known
            ]
        )

    def only(self, *names: str) -> "LastUploads":
        def chosen(state: State) -> State:
            return State({k: state[k] for k in names})

        uploads = tuple(Upload(chosen(u.message)) for u in self.uploads)
        return replace(self, items=uploads, total=chosen(self.total), first=chosen(self.first))

    def summed(self) -> "LastUploads":
        """Return the same uploads with their sum computed again from all of them."""
        total = self.each(lambda rows: widened(rows).sum(0))
        others = self.clients - len(self)
        return replace(self, total=State({name: t + others * self.first[name] for name, t in total.items()}))
