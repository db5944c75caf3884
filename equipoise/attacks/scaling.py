"""Boosted messages: honest differences times a factor, up to the replacement of the global model."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.attacks.base import Attack, AttackContext
from equipoise.attacks.rows import blocks, completed, forge
from equipoise.reducers import WeightedMean
from equipoise.settings import Count, NonNegative, Number, Positive
from equipoise.state import State, shares_of


def replacement(context: AttackContext) -> float:
    """Return the factor with which the attackers' differences outweigh those of all others in the mean.

    It is one over the attackers' part of all weights, and so n/f where all count the same.
    """
    every = [*context.weights, *context.benign_weights]
    weighted = isinstance(context.reducer, WeightedMean) and every and all(w is not None for w in every)
    if not weighted:
        return (len(context.own) + len(context.benign)) / len(context.own)
    shares = shares_of(torch.cat([w for w in every if w is not None]))
    return float(1 / shares[: len(context.weights)].sum())


def scaled(context: AttackContext, factor: float | None, bound: float | None = None) -> list[State]:
    """Return the attackers' own messages with differences from the origin that are scaled.

    Args:
        context: the round.
        factor: the factor; None is `replacement`.
        bound: the largest norm of a difference before it is scaled.
    """
    assert context.origin is not None
    factor = replacement(context) if factor is None else factor
    sent = []
    for own in context.own:
        cut = 1.0
        if bound is not None:
            length = sum(float((rows**2).sum()) for _, _, rows in blocks([own], context.origin)) ** 0.5
            cut = min(1.0, bound / length) if length > 0 else 1.0
        by = cut * factor
        if by == 1:  # the truth, to the last bit
            sent.append(own)
            continue
        sent.append(completed(forge([own], context.origin, partial(_times, by)), own))
    return sent


def _times(factor: float, rows: Tensor) -> Tensor:
    return factor * rows[0]


class Scaling(Attack):
    """The honest difference times a factor; by default the factor that replaces the global model."""

    paper: ClassVar[str] = "Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020"

    factor: Number | None = None
    "factor of the difference; by default one over the attackers' part of all weights (model replacement)"
    bound: Positive | None = None
    "largest norm of the difference before it is scaled"
    from_round: Count = 1
    "first round in which messages are scaled"

    @property
    def needs_origin(self) -> bool:
        return True

    def messages(self, context: AttackContext) -> Sequence[State]:
        return context.own if context.round < self.from_round else scaled(context, self.factor, self.bound)


class Boosted(Attack):
    """Base of attacks on samples whose honest messages may be scaled."""

    scale: NonNegative = 1.0
    "factor of the difference that is sent; 0 is the factor that replaces the global model"
    bound: Positive | None = None
    "largest norm of the difference before it is scaled"
    from_round: Count = 1
    "first round in which messages are scaled"

    @property
    def needs_origin(self) -> bool:
        return self.scale != 1 or self.bound is not None

    def messages(self, context: AttackContext) -> Sequence[State]:
        if context.round < self.from_round or not self.needs_origin:
            return context.own
        return scaled(context, self.scale or None, self.bound)
