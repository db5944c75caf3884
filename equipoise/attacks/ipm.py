"""Inner product manipulation: attackers send the opposite of what honest clients want."""

from typing import ClassVar

from torch import Tensor

from equipoise.attacks.base import AttackContext
from equipoise.attacks.knowledge import DirectedForgery
from equipoise.attacks.rows import forge
from equipoise.settings import NonNegative
from equipoise.state import State


class IPM(DirectedForgery):
    """Minus epsilon times the mean progress of the benign clients."""

    paper: ClassVar[str] = "Xie et al., Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product, UAI 2019"

    epsilon: NonNegative = 0.5
    "factor of the reversed mean; small ones pass rules based on distances, large ones reverse the mean of all"

    def forged(self, known: tuple[State, ...], context: AttackContext) -> State:
        assert context.origin is not None

        def reversed_mean(rows: Tensor) -> Tensor:
            return -self.epsilon * rows.mean(0)

        return forge(known, context.origin, reversed_mean)
