"""What a client keeps on its own disk: its state, one step ahead of what it knows the server took.

A client trains, writes the new state down as *pending*, and answers. With the next order the server says to which order
it took the update last: either the pending one, which then becomes the client's state, or an earlier one, and the
pending one is dropped. So the client's state moves on only with what the server accepted, whoever dies in between.

Where a round is several exchanges, the server says as well which of its orders within the round it took last. The state
before the round stays until all of them are done: who drops out of a round goes back to it.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from equipoise.errors import EquipoiseError
from equipoise.flower.codec import RejectedMessage, group, named
from equipoise.state import State
from equipoise.storage import atomic_files, tensor_files


@dataclass(frozen=True)
class StoredState:
    accepted: int = 0
    "the number of the order that ended the last round in which the server took this client's updates; 0: none"
    state: State | None = None
    "the client's state after it"
    trained: int = 0
    "the number of the order whose update the server may have taken"
    pending: State | None = None
    "the client's state if it has"
    newest: int = 0
    "the number of the newest order"
    within: int = 0
    "the number of the last order of a round that has begun whose update the server took; 0: none"
    step: State | None = None
    "the client's state after it"

    def settled(self, accepted: int, within: int = 0) -> "StoredState":
        """With the pending state taken over or dropped, as the server says."""
        if within:
            if accepted == self.accepted and within in (self.trained, self.within):
                step = self.pending if within == self.trained else self.step
                return StoredState(self.accepted, self.state, newest=self.newest, within=within, step=step)
        elif accepted and accepted in (self.trained, self.within):
            return StoredState(accepted, self.pending if accepted == self.trained else self.step, newest=self.newest)
        elif accepted == self.accepted:
            return StoredState(self.accepted, self.state, newest=self.newest)
        raise RejectedMessage(
            "out-of-step",
            f"the server took this client's update to order {within or accepted}, and the state here is that after "
            f"order {self.within or self.accepted}; put its state folder back, or take part under a new name",
        )

    @property
    def now(self) -> State | None:
        """What the next order works on."""
        return self.step if self.within else self.state

    def trained_on(self, number: int, client: State) -> "StoredState":
        """With what an order made of it, pending."""
        return replace(self, trained=number, pending=client, newest=number)


class ClientStateFile:
    """The folder of one client in one run."""

    def __init__(self, state: Path, run: str, name: str):
        self.path, self.name = state / run, name
        self.file = self.path / "state.safetensors"
        atomic_files.make_folder(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One order at a time: a slow one may still be at work when the next arrives."""
        with (self.path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def read(self) -> StoredState:
        if not self.file.exists():
            return StoredState()
        try:
            with safe_open(self.file, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["kept"])
                if facts["name"] != self.name:
                    raise EquipoiseError(
                        f"{self.file} is the state of {facts['name']!r}, not of {self.name!r}; "
                        "every client needs a state folder of its own"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return StoredState(
                facts["accepted"],
                group(tensors, "state") if facts["accepted"] else None,
                facts["trained"],
                group(tensors, "pending") if facts["trained"] else None,
                facts["newest"],
                facts.get("within", 0),
                group(tensors, "step") if facts.get("within") else None,
            )
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise EquipoiseError(f"the client's state in {self.file} cannot be read: {error}") from None

    def write(self, kept: StoredState) -> None:
        numbers = {"accepted": kept.accepted, "trained": kept.trained, "newest": kept.newest, "within": kept.within}
        facts = {"name": self.name, **numbers}
        states = {"state": kept.state, "pending": kept.pending, "step": kept.step}
        tensors = {k: t for name, state in states.items() for k, t in named(state or State(), name).items()}
        tensor_files.write_tensors(self.file, {k: t.clone() for k, t in tensors.items()}, {"kept": json.dumps(facts)})
