"""Attacks that are made for one defence: Krum, and the coordinate-wise trimmed mean or median."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.attacks.base import AttackContext
from equipoise.attacks.knowledge import DirectedForgery, KnowingAttack
from equipoise.attacks.rows import blocks, completed, forge, zeros
from equipoise.reducers import Krum
from equipoise.settings import LARGEST
from equipoise.state import State
from equipoise.torch_device import widened

_PAPER = "Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning, USENIX Security 2020"
_SMALLEST = 1e-5  # the search gives up below this


class FangKrum(DirectedForgery):
    """Against the direction in which benign clients move, as far as Krum still chooses the forged message."""

    paper: ClassVar[str] = _PAPER

    def forged(self, known: tuple[State, ...], context: AttackContext) -> State | None:
        assert context.origin is not None
        n, f = len(context.benign) + len(context.own), len(context.own)
        if f == 0 or n < 2 * f + 3:
            return None  # Krum is not defined for so few
        search = _KrumSearch(known, context.origin)
        coordinates = sum(t.numel() for t in context.origin.values())
        lam = search.start(n, f, coordinates)
        if self.knowledge == "benign":
            found = search.largest(lam, f, self._assumed(context, n, f))
        else:
            tried = (search.largest(lam, copies, copies) for copies in range(1, f + 1))
            found = next((one for one in tried if one is not None), None)
        step = _SMALLEST if found is None else found
        return forge(known, context.origin, lambda rows: -step * rows.mean(0).sign())

    def _assumed(self, context: AttackContext, n: int, f: int) -> int:
        """Return the number of attackers that the defence assumes; the true one if it is not Krum."""
        reducer = context.reducer
        return min(round(reducer.malicious * n), n - 1) if isinstance(reducer, Krum) else f


class _KrumSearch:
    """Scores of Krum with copies of the message o - lam s among known ones, from inner products alone."""

    def __init__(self, known: Sequence[State], origin: State):
        """Compute what distances follow from.

        Args:
            known: messages of which the attackers know.
            origin: o.
        """
        n = len(known)
        like = widened(next(iter(known[0].values())).new_zeros(()))
        self.size, self.lengths, self.along = like, like.new_zeros(n), like.new_zeros(n)
        gram = like.new_zeros(n, n)
        for _, _, rows in blocks(known, origin):
            mean = rows.mean(0)
            s, centred = mean.sign(), rows - mean
            self.size, self.lengths = self.size + s.abs().sum(), self.lengths + (rows**2).sum(1)
            self.along, gram = self.along + rows @ s, gram + centred @ centred.T
        norms = gram.diagonal()
        self.apart = (norms[:, None] + norms - 2 * gram).clamp(min=0).fill_diagonal_(torch.inf)

    def start(self, n: int, f: int, coordinates: int) -> float:
        """Return the first lam that is tried.

        Args:
            n: number of messages of the round.
            f: number of attackers.
            coordinates: number of coordinates of a message.
        """
        nearest = self.apart.sqrt().sort(dim=1).values[:, : min(n - f - 2, len(self.apart) - 1)]
        around = nearest.sum(1).min() / (n - 2 * f - 1)
        return float((around + self.lengths.max().sqrt()) / coordinates**0.5)

    def largest(self, lam: float, copies: int, assumed: int) -> float | None:
        """Return the first lam, halved again and again, with which Krum chooses a forged message.

        Args:
            lam: where to begin.
            copies: number of forged messages.
            assumed: number of attackers that Krum assumes.
        """
        known = len(self.apart)
        n = known + copies
        neighbours = max(n - assumed - 2, 1)
        while lam >= _SMALLEST:
            to = (self.lengths + 2 * lam * self.along + lam**2 * self.size).clamp(min=0)
            theirs = torch.cat([self.apart, to[:, None].expand(-1, copies)], dim=1).sort(dim=1).values[:, :neighbours]
            forged = torch.cat([to.new_zeros(copies - 1), to]).sort().values[:neighbours]
            if forged.sum() < theirs.sum(1).min():
                return lam
            lam /= 2
        return None


class FangTrimmed(KnowingAttack):
    """Values beyond all benign ones in every coordinate, on the side opposite to their mean."""

    paper: ClassVar[str] = _PAPER

    b: Annotated[float, Field(ge=1, le=LARGEST)] = 2.0
    "how far beyond the extreme benign value at most: by this factor"
    of: Literal["difference", "message"] = "difference"
    "whether the values are differences from what was sent to the clients, or messages themselves"

    @property
    def needs_origin(self) -> bool:
        return self.of == "difference"

    def messages(self, context: AttackContext) -> Sequence[State]:
        known = self.known(context)
        if len(known) < 2:
            return context.own
        centre = context.origin if self.of == "difference" and context.origin is not None else zeros(known[0])
        low = forge(known, centre, lambda rows: self._ends(rows)[0])
        high = forge(known, centre, lambda rows: self._ends(rows)[1])
        return [
            completed(self._drawn(low, high, context.generator(name)), own)
            for name, own in zip(context.names, context.own, strict=True)
        ]

    def _drawn(self, low: State, high: State, rng: torch.Generator) -> State:
        drawn = {}
        for name, t in low.items():
            share = torch.rand(t.shape, generator=rng, dtype=t.dtype).to(t.device)
            drawn[name] = torch.clamp(t + share * (high[name] - t), t, high[name])
        return State(drawn)

    def _ends(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of the intervals from which the forged values are drawn."""
        mean = rows.mean(0)
        s, b = mean.sign(), self.b
        if self.knowledge == "own":
            near, far = mean - s * 3 * rows.std(0), mean - s * 4 * rows.std(0)
        else:
            least, most = rows.amin(0), rows.amax(0)
            near = torch.where(s > 0, least, most)
            # Away from zero on one side of it, towards zero on the other: always beyond all benign values.
            far = torch.where(near * s > 0, near / b, near * b)
        near, far = (torch.where(s == 0, mean, end) for end in (near, far))
        return torch.minimum(near, far), torch.maximum(near, far)
