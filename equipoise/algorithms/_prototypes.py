"""Centres of classes among representations (prototypes): the pull towards them, and their means over clients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.representations.terms import LossTerm
from equipoise.state import State


class Alignment(LossTerm):
    """R: the squared distance of features from the centre of their class."""

    @staticmethod
    def each(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, given: State) -> Tensor:
        return given.weight[y] * (h[0] - given.c[y]).square().mean(-1)


def with_count(h: Tensor) -> Tensor:
    """Return features with a column of ones, whose sum over a class is its number of samples."""
    return torch.cat([h, torch.ones_like(h[:, :1])], dim=1)


def next_centres(before: State, seen: State) -> State:
    """Return the centres `c` of all classes after a round, and which of them are `known`; those of absent ones stay.

    Args:
        before: the same before the round.
        seen: means over the clients of sums of features (`sums`) and of counts (`n`), by class.
    """
    c = torch.where(seen.n[:, None] > 0, seen.sums / seen.n[:, None].clamp(min=1e-12), before.c)
    return State(c=c, known=torch.maximum(before.known, (seen.n > 0).to(c.dtype)))
