"""What a reducer may know besides the messages: where they began, the round, and what it remembers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from equipoise import randomness
from equipoise.errors import EquipoiseError
from equipoise.state import State, Uploads


@dataclass(frozen=True)
class ReductionContext:
    """What a reducer may know in a round besides the messages."""

    origin: State | None = None
    "the message of a client that learned nothing in the round; None if the algorithm has none"
    memory: State = field(default_factory=State)
    "what the reducer remembers"
    round: int = 1
    rounds: int = 1
    "number of rounds of the run"
    seed: int = 0
    clients: int = 0
    "number of clients that train"
    name_of: Callable[[int], str] = str
    "returns the name of the client with a number"
    algorithm: str = "the algorithm"
    "name of the algorithm, for error messages"

    @staticmethod
    def alone(uploads: Uploads) -> "ReductionContext":
        """Return the context of messages without a run: they are differences, of the first round."""
        origin = State({k: torch.zeros_like(t) for k, t in uploads.like.items()})
        return ReductionContext(origin, clients=len(uploads))

    def generator(self, *parts: int | str) -> np.random.Generator:
        """Return the random generator of a draw of this round."""
        return randomness.generator(self.seed, "reducer", self.round, *parts)

    def names(self, uploads: Uploads) -> list[str]:
        """Return the name of the client of each message."""
        return [self.name_of(who) for who in uploads.senders]

    def origin_for(self, uploads: Uploads, rule: object) -> State:
        """Return the origin of all fields of the messages; raise an error that names the rule if there is none."""
        if self.origin is None or not uploads.like.keys() <= self.origin.keys():
            raise EquipoiseError(no_origin(rule, self.algorithm))
        return State({name: self.origin[name] for name in uploads.like})


def no_origin(rule: object, algorithm: str) -> str:
    """Return why a rule cannot be used with an algorithm whose messages have no origin."""
    return (
        f"reducer {type(rule).__name__} compares messages with what clients began with, and messages of {algorithm} "
        "are not changes of anything that the server knows; use a rule on the messages themselves, such as 'median'"
    )
