"""What an attack is: what malicious clients do to their data, and what they send instead of the truth."""

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
    """All that attackers may know when they forge the messages of a round: an omniscient one uses all of it."""

    round: int
    names: tuple[str, ...]
    "the malicious clients of the round"
    own: tuple[State, ...]
    "what each of them would send if it were honest"
    benign: tuple[State, ...]
    "what the benign clients of the round sent"
    server: State
    "the server's state before the round"
    seed: int

    def generator(self, name: str) -> torch.Generator:
        return randomness.torch_generator(self.seed, "attack", self.round, name)


class Attack(Settings, ABC):
    """Malicious clients. They act on the quantity that the algorithm's paper sends, in every engine."""

    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    "which part of the clients is malicious, drawn from the seed"
    clients: tuple[str, ...] = ()
    "the names of the malicious clients, in place of a fraction"

    def malicious(self, names: Sequence[str], seed: int) -> frozenset[str]:
        """Who of these clients is malicious."""
        if unknown := sorted(set(self.clients) - set(names)):
            raise EquipoiseError(
                f"attack.clients names {unknown[0]!r}, which is none of the {len(names)} clients that train; "
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
            raise EquipoiseError("all clients are malicious; scores are those of benign clients, so there must be one")
        return frozenset(chosen)

    def messages(self, scene: AttackContext) -> Sequence[State]:
        """What the malicious clients of a round send, in the order of `scene.names`."""
        return [self.message(own, scene.generator(name)) for own, name in zip(scene.own, scene.names, strict=True)]

    def message(self, own: State, rng: torch.Generator) -> State:
        """What a malicious client sends that knows no more than its own honest message."""
        return own

    def labels(self, y: Tensor, classes: int | None, rng: torch.Generator) -> Tensor:
        """What a malicious client trains on in place of its training targets y; it is the same in every round."""
        return y
