"""The contract of an attack: what malicious clients train on, and what they send in place of their updates."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from equipoise import randomness
from equipoise.errors import EquipoiseError
from equipoise.settings import Settings
from equipoise.state import State


@dataclass(frozen=True)
class AttackContext:
    """What attackers know when they forge the messages of a round; an omniscient attack uses all of it."""

    round: int
    "number of the round"
    names: tuple[str, ...]
    "names of the malicious clients of the round"
    own: tuple[State, ...]
    "messages that each of them would send if it were honest"
    benign: tuple[State, ...]
    "messages of the benign clients of the round"
    server: State
    "the server's state before the round"
    seed: int
    "seed of the run"

    def generator(self, name: str) -> torch.Generator:
        """Return the random generator of a malicious client for this round."""
        return randomness.torch_generator(self.seed, "attack", self.round, name)


class Attack(Settings, ABC):
    """Malicious clients, which act in every engine on the messages that the algorithm's paper defines."""

    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    "fraction of the clients that are malicious, drawn from the seed"
    clients: tuple[str, ...] = ()
    "names of the malicious clients, in place of a fraction"

    def malicious(self, names: Sequence[str], seed: int) -> frozenset[str]:
        """Return the names of those clients that are malicious."""
        if unknown := sorted(set(self.clients) - set(names)):
            raise EquipoiseError(
                f"attack.clients names {unknown[0]!r}, which is not one of the {len(names)} clients that train; "
                f"they have names such as {min(names)!r}"
            )
        if self.clients:
            chosen = set(self.clients)
        else:
            ordered = sorted(names)
            count = round(self.fraction * len(ordered))
            drawn = randomness.generator(seed, "malicious").choice(len(ordered), count, replace=False)
            chosen = {ordered[i] for i in drawn}
        if len(chosen) == len(names):
            raise EquipoiseError("all clients are malicious; at least one must be benign, as only those are scored")
        return frozenset(chosen)

    def messages(self, context: AttackContext) -> Sequence[State]:
        """Return the messages that the malicious clients of a round send, in the order of `context.names`."""
        return [
            self.message(own, context.generator(name)) for own, name in zip(context.own, context.names, strict=True)
        ]

    def message(self, own: State, rng: torch.Generator) -> State:
        """Return the message of a malicious client that knows only its own honest message."""
        return own

    def labels(self, y: Tensor, classes: int | None, rng: torch.Generator) -> Tensor:
        """Return the targets that a malicious client trains on in place of y; they are the same in every round."""
        return y
