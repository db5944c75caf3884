"""What a reducer may know besides the messages: where they began, the round, and what it remembers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from equipoise import randomness
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace
from equipoise.state import State, Uploads
from equipoise.torch_device import wide_dtype

_PIECE = 1 << 16


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
    name_of: Callable[[int], str] = str
    "returns the name of the client with a number"
    algorithm: str = "the algorithm"
    "name of the algorithm, for error messages"
    space: ParameterSpace | None = None
    "how the model lies in a vector"
    models: tuple[str, ...] = ()
    "fields of the messages that are whole models of the kind that all clients share"

    @staticmethod
    def alone(uploads: Uploads, memory: State) -> "ReductionContext":
        """Return the context of messages without a run: they are differences, of the first round."""
        origin = State({k: torch.zeros_like(t) for k, t in uploads.like.items()})
        return ReductionContext(origin, memory)

    def generator(self, *parts: int | str) -> np.random.Generator:
        """Return the random generator of a draw of this round."""
        return randomness.generator(self.seed, "reducer", self.round, *parts)

    def normal(self, field: str, like: Tensor) -> Tensor:
        """Return standard normal noise for a field of the message, in float64."""
        drawn = []
        for low in range(0, like.numel(), _PIECE):  # in pieces of their own, whatever blocks messages are read in
            rng = randomness.torch_generator(self.seed, "reducer", self.round, "noise", field, low)
            drawn.append(torch.randn(min(_PIECE, like.numel() - low), generator=rng, dtype=torch.float64))
        flat = torch.cat([*drawn, torch.empty(0, dtype=torch.float64)])
        return flat.to(wide_dtype(like.device)).to(like.device).reshape(like.shape)

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
