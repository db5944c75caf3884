"""The last upload of every client, for algorithms whose server combines all of them in every round.

The uploads are stored with the clients' states, on disk when there are many. Only their sum is in memory: a round
changes it by the difference between its uploads and those before, so that a mean over all clients costs no more than a
mean over the round. In the mean, a client that has never taken part counts with the initial upload; robust rules see
only clients that have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from equipoise.executors.base import SENT
from equipoise.state import State, Upload, Uploads, UploadsOfRound, equal_shares
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

    def with_round(self, uploads: UploadsOfRound, store: UploadStore) -> "LastUploads":
        """Return the last uploads of all clients, with those of the round in place of the ones before."""
        known, newcomers = set(self.known), set()
        for who in uploads.who:
            if who not in known and len(known) >= self.clients:  # more than were announced: all count
                newcomers.add(who)
            known.add(who)
        largest = 0.0

        def changes() -> Iterator[tuple[int, State, float]]:
            nonlocal largest
            for who, upload in uploads.own:
                if not uploads.placement.owns(who):
                    continue
                message = upload.message
                if who in newcomers:
                    yield who, State({k: widened(t) for k, t in message.items()}), 1.0
                    continue
                before = State({k: store.get(who)[SENT + k].to(t.device) for k, t in message.items()})
                yield who, State({k: widened(t) - before[k] for k, t in message.items()}), 1.0
                largest = max([largest, *(float(t.abs().max()) for t in before.values() if t.numel())])

        device = next(iter(self.total.values())).device
        change = uploads.placement.total(changes(), device) or {}
        total = State({name: t + change[name] if name in change else t for name, t in self.total.items()})
        round = dict(uploads.own)
        everyone = LastUploads(uploads, round, store, tuple(sorted(known)), total, self.first, self.clients)
        left = max((float(t.abs().max()) for t in total.values() if t.numel()), default=0.0)
        # Beside a huge number the others were rounded away; when it leaves, the sum is computed again.
        return everyone.summed() if uploads.placement.ranks.any(largest > _HUGE * left) else everyone

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
        self.total = State({name: tensors[f"last.total.{name}"].to(t) for name, t in self.total.items()})


@dataclass(frozen=True)
class LastUploads(Uploads):
    """The last upload of every client. Rows are those of the clients that have taken part, by their numbers."""

    round: UploadsOfRound
    "the uploads of the round"
    fresh: Mapping[int, Upload]
    "those of them that are in this process, by the clients' numbers"
    store: UploadStore
    known: tuple[int, ...]
    "numbers of the clients that have taken part"
    total: State
    "sum over all clients"
    first: State
    "upload assumed for the others"
    announced: int
    "number of clients that were announced"

    @property
    def who(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.round.who

    @property
    def senders(self) -> tuple[int, ...]:
        return self.known

    def __len__(self) -> int:
        return len(self.known)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return self.round.uploads

    @property
    def weighted(self) -> bool:
        return self.round.weighted

    @property
    def clients(self) -> int:
        """Return the number of clients that count in the mean."""
        return max(self.announced, len(self.known))

    @property
    def like(self) -> State:
        return self.round.like

    def mean(self) -> State:
        return State({name: (t / self.clients).to(self.like[name].dtype) for name, t in self.total.items()})

    def weights(self) -> Tensor:
        return equal_shares(len(self), self.like)

    def columns(self, name: str, low: int, high: int) -> Tensor:
        own = [self._part(who, name, low, high) for who in self.known if self.round.placement.owns(who)]
        return self.round.placement.rows(own, self.like[name].flatten()[low:high])

    def _part(self, who: int, name: str, low: int, high: int) -> Tensor:
        if who in self.fresh:
            return self.fresh[who].message[name].flatten()[low:high]
        return self.store.part(who, SENT + name, low, high).to(self.like[name].device)

    def only(self, *names: str) -> "LastUploads":
        def chosen(state: State) -> State:
            return State({k: state[k] for k in names})

        fresh = {who: Upload(chosen(u.message)) for who, u in self.fresh.items()}
        chosen_round = self.round.only(*names)
        return replace(self, round=chosen_round, fresh=fresh, total=chosen(self.total), first=chosen(self.first))

    def summed(self) -> "LastUploads":
        """Return the same uploads with their sum computed again from all of them."""

        def own() -> Iterator[tuple[int, State, float]]:
            for who in filter(self.round.placement.owns, self.known):
                message = self.fresh[who].message if who in self.fresh else None
                kept = self.store.get(who) if message is None else {SENT + k: t for k, t in message.items()}
                yield who, State({k: widened(kept[SENT + k].to(t.device)) for k, t in self.first.items()}), 1.0

        device = next(iter(self.total.values())).device
        total = self.round.placement.total(own(), device) or {}
        others = self.clients - len(self)
        return replace(self, total=State({k: total.get(k, 0) + others * widened(t) for k, t in self.first.items()}))
