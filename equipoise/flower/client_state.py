"""A client's state on its own disk, with the newest state marked as pending until the server has accepted the update.

A client trains, writes the new state as *pending*, and answers. The next order says for which order the server last
accepted an update. If it is the pending one, the pending state becomes the client's state; if it is an earlier one, the
pending state is dropped. The client's state thus only advances with updates that the server accepted, even if the
client or the server crashes in between.

If a round has several exchanges, the order also says for which order of the current round the server last accepted an
update. The state before the round is kept until all its exchanges are done: a client that drops out of a round goes
back to it.

A server that has gone wrong may go back to an earlier checkpoint. It then names an earlier order as the last one that
it accepted, so the last few accepted states are kept, as many as the server keeps checkpoints.
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

STATE_FILE = "state.safetensors"
EVIDENCE = "releases"
"""Under which a state file records how much the client had released when it was written; see `release_ledger`."""
_EARLIER = "earlier-"  # begins the names of the tensors of earlier states


@dataclass(frozen=True)
class StoredState:
    """A client's state, and the numbers of the orders that it belongs to."""

    accepted: int = 0
    "number of the order that ended the last round in which the server accepted this client's updates; 0: none"
    state: State | None = None
    "the client's state after that order"
    trained: int = 0
    "number of the order whose update the server may have accepted"
    pending: State | None = None
    "the client's state if the server has accepted it"
    newest: int = 0
    "number of the newest order"
    within: int = 0
    "number of the last order of an unfinished round whose update the server accepted; 0: none"
    step: State | None = None
    "the client's state after that order"
    earlier: tuple[tuple[int, State | None], ...] = ()
    "what `accepted` and `state` were before, the newest first"

    def settled(self, accepted: int, within: int = 0, keep: int = 1) -> "StoredState":
        """Return this with the pending state taken over or dropped, or as it was when an earlier update was accepted.

        Args:
            accepted: the order that ended the last round in which the server accepted this client's updates.
            within: the last order of the current round whose update the server accepted; 0: none.
            keep: number of accepted states to keep.
        """
        base = StoredState(self.accepted, self.state, newest=self.newest, earlier=self.earlier[: keep - 1])
        if within:
            if accepted == self.accepted and within in (self.trained, self.within):
                return replace(base, within=within, step=self.pending if within == self.trained else self.step)
        elif accepted and accepted in (self.trained, self.within):
            state = self.pending if accepted == self.trained else self.step
            earlier = ((self.accepted, self.state), *self.earlier)[: keep - 1]
            return StoredState(accepted, state, newest=self.newest, earlier=earlier)
        elif accepted == self.accepted:
            return base
        else:
            for k, (number, state) in enumerate(self.earlier):
                if number == accepted:
                    return StoredState(number, state, newest=self.newest, earlier=self.earlier[k + 1 :])
        raise RejectedMessage(
            "out-of-step",
            f"the server accepted this client's update to order {within or accepted}, but the state here is that after "
            f"order {self.within or self.accepted}; restore its state folder, or take part under a new name",
        )

    @property
    def now(self) -> State | None:
        """Return the state that the next order starts from."""
        return self.step if self.within else self.state

    def trained_on(self, number: int, client: State) -> "StoredState":
        """Return this with a new state, pending, after training for an order."""
        return replace(self, trained=number, pending=client, newest=number)


class ClientStateFile:
    """A client's state on disk: one folder per client and run."""

    def __init__(self, state: Path, run: str, name: str):
        self.path, self.name = state / run, name
        self.file = self.path / STATE_FILE
        self.evidence: str | None = None
        "what is recorded of the client's releases, under privacy"
        atomic_files.make_folder(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock, because a slow order may still be in progress when the next one arrives."""
        with (self.path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def read(self) -> StoredState:
        """Read the state; return an empty one if there is no file."""
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
            earlier = tuple(
                (number, group(tensors, f"{_EARLIER}{k}") if number else None)
                for k, number in enumerate(facts.get("earlier", ()))
            )
            return StoredState(
                facts["accepted"],
                group(tensors, "state") if facts["accepted"] else None,
                facts["trained"],
                group(tensors, "pending") if facts["trained"] else None,
                facts["newest"],
                facts.get("within", 0),
                group(tensors, "step") if facts.get("within") else None,
                earlier,
            )
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise EquipoiseError(f"the client's state in {self.file} cannot be read: {error}") from None

    def write(self, stored: StoredState) -> None:
        """Write the state, replacing the file at once."""
        facts = {
            "name": self.name,
            "accepted": stored.accepted,
            "trained": stored.trained,
            "newest": stored.newest,
            "within": stored.within,
            "earlier": [number for number, _ in stored.earlier],
        }
        states = {"state": stored.state, "pending": stored.pending, "step": stored.step}
        states |= {f"{_EARLIER}{k}": state for k, (_, state) in enumerate(stored.earlier)}
        tensors = {k: t for name, state in states.items() for k, t in named(state or State(), name).items()}
        metadata = {"kept": json.dumps(facts)} | ({} if self.evidence is None else {EVIDENCE: self.evidence})
        tensor_files.write_tensors(self.file, {k: t.clone() for k, t in tensors.items()}, metadata)
