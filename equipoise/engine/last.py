"""The last message of every client, for algorithms whose server uses them all, whoever takes part in a round.

Messages lie with the clients' states in the store, on disk when they are many. In memory is their sum: a round changes
it by what its own messages differ from those before them, so that a mean over all clients costs no more than one over
the round. Who has not been heard of yet counts with the message that all begin with.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equipoise.engine.executor import SENT
from equipoise.engine.store import ClientStore
from equipoise.state import State, Upload, Uploads


class LastMessages:
    def __init__(self, first: State, clients: int):
        self.first, self.clients = first, clients
        self.heard: set[int] = set()
        self.total = State({name: clients * t.double() for name, t in first.items()})
        "of all messages; in float64, so that rounding does not add up over the rounds"

    @property
    def initial(self) -> State:
        """What the store keeps for a client before it is heard of."""
        return State({SENT + name: t for name, t in self.first.items()})

    def with_round(self, uploads: Uploads, store: ClientStore) -> "Everyone":
        """All last messages, those of the round in the place of the ones before."""
        total = State({name: t.clone() for name, t in self.total.items()})
        heard = set(self.heard)
        for who, upload in zip(uploads.who, uploads.uploads, strict=True):
            newcomer = who not in heard and len(heard) >= self.clients  # more than were announced: all count
            heard.add(who)
            for name, t in upload.message.items():
                total[name] += t
                if not newcomer:
                    total[name] -= store.get(who)[SENT + name]
        return Everyone(uploads.who, uploads.uploads, self, store, tuple(sorted(heard)), total)

    def take(self, everyone: "Everyone") -> dict[int, State]:
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
class Everyone(Uploads):
    """The last message of every client. Rows are in the order of the clients' numbers, the unheard at the end."""

    last: LastMessages
    store: ClientStore
    heard: tuple[int, ...]
    total: State

    @cached_property
    def fresh(self) -> dict[int, Upload]:
        return dict(zip(self.who, self.uploads, strict=True))

    def __len__(self) -> int:
        return max(self.last.clients, len(self.heard))

    def columns(self, name: str, low: int, high: int) -> Tensor:
        rows = [
            self.fresh[who].message[name].flatten()[low:high]
            if who in self.fresh
            else self.store.part(who, SENT + name, low, high)
            for who in self.heard
        ]
        unheard = self.last.first[name].flatten()[low:high]
        return torch.stack(rows + [unheard] * (len(self) - len(rows)))

    def mean(self) -> State:
        return State({name: (t / len(self)).to(self.like[name].dtype) for name, t in self.total.items()})

    def weights(self) -> Tensor:
        return torch.full((len(self),), 1 / len(self), dtype=torch.float64)
