"""What attackers know: the messages of all benign clients, or only their own honest ones."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from equipoise.attacks.base import Attack, AttackContext
from equipoise.attacks.rows import completed
from equipoise.state import State


class KnowingAttack(Attack):
    """Base of attacks that are made from messages that the attackers know."""

    knowledge: Literal["benign", "own"] = "benign"
    "messages that the attackers know: those of all benign clients, or only what they would send themselves"

    def known(self, context: AttackContext) -> tuple[State, ...]:
        """Return the messages that the attackers know."""
        return context.benign if self.knowledge == "benign" else context.own


class CommonForgery(KnowingAttack):
    """Base of those in which all malicious clients of a round send the same."""

    def messages(self, context: AttackContext) -> Sequence[State]:
        known = self.known(context)
        forged = self.forged(known, context) if len(known) > 1 else None  # one message has no spread
        return context.own if forged is None else [completed(forged, own) for own in context.own]

    @abstractmethod
    def forged(self, known: tuple[State, ...], context: AttackContext) -> State | None:
        """Return the message that all attackers send, or None if they send the truth.

        Args:
            known: the messages that the attackers know, at least two.
            context: the round.
        """


class DirectedForgery(CommonForgery):
    """Base of those that act on differences from the message of a client that learned nothing."""

    @property
    def needs_origin(self) -> bool:
        return True
