"""A little is enough: messages that are off by less than honest ones differ."""

from math import ceil
from statistics import NormalDist
from typing import ClassVar, Literal

from torch import Tensor

from equipoise.attacks.base import AttackContext
from equipoise.attacks.knowledge import CommonForgery
from equipoise.attacks.rows import forge, zeros
from equipoise.settings import NonNegative
from equipoise.state import State

_MAJORITY = 1.5  # z where the attackers are the majority, so that no quantile bounds it


def largest_z(clients: int, malicious: int) -> float:
    """Return how many deviations attackers can be off and still have benign clients beyond them.

    Args:
        clients: number of clients of a round.
        malicious: number of attackers among them.
    """
    below = (ceil(clients / 2) - 1) / (clients - malicious)
    if below >= 1:
        return _MAJORITY
    return max(NormalDist().inv_cdf(below), 0.0) if below > 0 else 0.0


class ALIE(CommonForgery):
    """The mean of the benign messages, moved by z of their standard deviations in every coordinate."""

    paper: ClassVar[str] = "Baruch et al., A Little Is Enough, NeurIPS 2019"

    z: NonNegative | None = None
    "deviations by which the message is off; by default as many as leave a majority that looks as far away"
    direction: Literal["minus", "plus"] = "minus"
    "in which direction"

    def notes(self, clients: int, malicious: int) -> list[str]:
        if self.z is not None or not 0 < malicious < clients:
            return []
        z = largest_z(clients, malicious)
        if z == 0:
            return [
                f"attack.name = 'alie' with {malicious} malicious of {clients} clients sends the mean of the benign "
                "(z = 0), because so few could not be off without being seen; set attack.z, or choose another attack"
            ]
        majority = (ceil(clients / 2) - 1) / (clients - malicious) >= 1
        return [f"attack.name = 'alie': the attackers are the majority, so z = {z}"] if majority else []

    def forged(self, known: tuple[State, ...], context: AttackContext) -> State:
        n, f = len(context.benign) + len(context.own), len(context.own)
        z = largest_z(n, f) if self.z is None and f < n else (self.z or 0.0)
        z = z if self.direction == "plus" else -z

        def off(rows: Tensor) -> Tensor:
            return rows.mean(0) + z * rows.std(0)

        return forge(known, zeros(known[0]), off)
