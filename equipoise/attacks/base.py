"""The contract of an attack: what malicious clients train on, and what they send in place of their updates."""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equipoise import randomness
from equipoise.errors import EquipoiseError
from equipoise.reducers import Reducer
from equipoise.settings import Settings
from equipoise.state import State

AS_GIVEN = (0.0, 1.0)
"""Mean and deviation of inputs that were not normalised."""


@dataclass(frozen=True)
class AttackContext:
    """What attackers know when they forge the messages of a round; an omniscient attack uses all of it."""

    round: int
    "number of the round, from 1"
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
    benign_names: tuple[str, ...] = ()
    "names of the benign clients of the round"
    weights: tuple[Tensor | None, ...] = ()
    "weights that the malicious clients would send; None where the algorithm sends none"
    benign_weights: tuple[Tensor | None, ...] = ()
    "weights of the benign clients"
    clients: tuple[str, ...] = ()
    "names of all clients that train"
    origin: State | None = None
    "the message of a client that learned nothing in this round, as far as the server knows it (`Algorithm.origin`)"
    reducer: Reducer | None = None
    "the reducer that will combine the messages"
    memory: State = field(default_factory=State)
    "what `Attack.remember` returned after the round before"

    def generator(self, name: str) -> torch.Generator:
        """Return the random generator of a malicious client for this round."""
        return randomness.torch_generator(self.seed, "attack", self.round, name)


@dataclass(frozen=True)
class PoisonContext:
    """What a malicious client knows when it poisons its training samples."""

    classes: int | None
    "number of labels; None where the targets are numbers"
    rng: torch.Generator
    "the client's source of randomness; the same in every round"
    index: int = 0
    "place of the client among the malicious ones in the order of their names, from 0"
    normalize: tuple[float, float] = AS_GIVEN
    "mean that was subtracted from the inputs, and deviation by which they were divided"


def unchanged(x: Tensor, normalize: tuple[float, float]) -> Tensor:
    """Return the inputs as they are: the trigger of an attack without one."""
    return x


@dataclass(frozen=True)
class SuccessMeasure:
    """How to measure whether an attack makes models predict the label that the attackers want."""

    target: int
    "the label that the attackers want"
    source: int | None = None
    "the label of the samples that are scored; without it those of all labels but the target are"
    trigger: Callable[[Tensor, tuple[float, float]], Tensor] = unchanged
    "marks inputs, given how they were normalised"
    described: str = ""
    "trigger and choice of inputs in words, so that runs with the same measure are recognised; empty without them"
    among: Callable[[Tensor], Tensor] | None = None
    "returns a mask of the inputs that are scored, of those with the right label; without it all are"

    @property
    def marks(self) -> bool:
        """Tell whether there is a trigger."""
        return self.trigger is not unchanged

    def concerned(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a mask of the samples that are scored."""
        labels = y != self.target if self.source is None else y == self.source
        return labels if self.among is None else labels & self.among(x)

    def facts(self) -> dict[str, Any]:
        """Return the measure as JSON."""
        return {"target": self.target, "source": self.source, "samples": self.described or None}


class Attack(Settings, ABC):
    """Malicious clients, which act in every engine on the messages that the algorithm's paper defines."""

    registry: ClassVar[Mapping[str, type["Attack"]]] = {}
    """All attacks by name; set by the registry, which imports them."""

    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    "fraction of the clients that are malicious, drawn from the seed; smaller fractions are subsets of larger ones"
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
            # The first ones of one order, so that 10% of the clients are among the 20% of another run.
            drawn = randomness.generator(seed, "malicious").permutation(len(ordered))[:count]
            chosen = {ordered[i] for i in drawn}
        if len(chosen) == len(names):
            raise EquipoiseError("all clients are malicious; at least one must be benign, as only those are scored")
        return frozenset(chosen)

    @property
    def needs_origin(self) -> bool:
        """Tell whether the attack acts on differences from `AttackContext.origin`."""
        return False

    @property
    def needs_weights(self) -> bool:
        """Tell whether the attack is about the weights that clients send."""
        return False

    @property
    def needs_labels(self) -> bool:
        """Tell whether the attack is about labels."""
        return False

    @property
    def pools(self) -> bool:
        """Tell whether attackers look at each other's training samples, which they can in the simulator only."""
        return False

    def prepared(self, x: Tensor, y: Tensor) -> "Attack":
        """Return the attack with what it needs of the training samples of all malicious clients, if it pools them."""
        return self

    @property
    def forges(self) -> bool:
        """Tell whether the attack changes messages or weights; others change training samples only."""
        own = type(self)
        return any(getattr(own, name) is not getattr(Attack, name) for name in ("messages", "message", "weights"))

    def notes(self, clients: int, malicious: int) -> list[str]:
        """Return what a user should know of the attack on a round with so many clients, one sentence each."""
        return []

    def messages(self, context: AttackContext) -> Sequence[State]:
        """Return the messages that the malicious clients of a round send, in the order of `context.names`."""
        return [
            self.message(own, context.generator(name)) for own, name in zip(context.own, context.names, strict=True)
        ]

    def message(self, own: State, rng: torch.Generator) -> State:
        """Return the message of a malicious client that knows only its own honest message."""
        return own

    def weights(self, context: AttackContext) -> Sequence[Tensor | None]:
        """Return the weights that the malicious clients claim; one that is not finite and positive is not sent."""
        return context.weights

    def remember(self, context: AttackContext) -> State:
        """Return what the attackers remember of a round, also if none of them took part in it."""
        return context.memory

    def samples(self, x: Tensor, y: Tensor, context: PoisonContext) -> tuple[Tensor, Tensor]:
        """Return the training samples that a malicious client uses in place of its own; the same in every round.

        Args:
            x: inputs of all its training samples; they must not be changed in place.
            y: targets of these samples.
            context: what else the client knows.
        """
        return x, y

    def success(self) -> SuccessMeasure | None:
        """Return how the success of the attack is measured beyond the damage that it does, if it is."""
        return None
