"""Attacks on messages that need no knowledge about other clients."""

from typing import ClassVar

import torch

from equipoise.attacks.base import Attack
from equipoise.settings import NonNegative
from equipoise.state import State

_FLAME = "FLAME, Section V-D"


def _normal(variance: float, rng: torch.Generator) -> float:
    return float(variance**0.5 * torch.randn((), generator=rng, dtype=torch.float64).item())


class SameValue(Attack):
    """The message is p in every coordinate, with p ~ N(0, variance) drawn for every client and round."""

    paper: ClassVar[str] = _FLAME
    variance: NonNegative = 0.1
    "variance of p"

    def message(self, own: State, rng: torch.Generator) -> State:
        p = _normal(self.variance, rng)
        return State({name: torch.full_like(t, p) for name, t in own.items()})


class SignFlip(Attack):
    """The message is -|p| times the honest one, with p ~ N(0, variance) drawn for every client and round."""

    paper: ClassVar[str] = _FLAME
    variance: NonNegative = 0.1
    "variance of p"

    def message(self, own: State, rng: torch.Generator) -> State:
        p = _normal(self.variance, rng)
        return State({name: -abs(p) * t for name, t in own.items()})


class Gaussian(Attack):
    """The message is noise, N(0, variance) in every coordinate."""

    paper: ClassVar[str] = _FLAME
    variance: NonNegative = 0.1
    "variance of every coordinate"

    def message(self, own: State, rng: torch.Generator) -> State:
        scale = self.variance**0.5
        return State(
            {name: scale * torch.randn(t.shape, generator=rng, dtype=t.dtype).to(t.device) for name, t in own.items()}
        )
