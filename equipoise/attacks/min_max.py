"""The message that is as harmful as possible while no farther from benign messages than these are from each other."""

from abc import abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from equipoise.attacks.base import AttackContext
from equipoise.attacks.knowledge import CommonForgery
from equipoise.attacks.rows import blocks, forge, zeros
from equipoise.state import State

_PAPER = "Shejwalkar and Houmansadr, Manipulating the Byzantine, NDSS 2021"


class _Farthest(CommonForgery):
    """The mean of the known messages plus gamma times a direction p, with the largest gamma that stays among them."""

    direction: Literal["std", "unit", "sign"] = "std"
    "p: minus the standard deviations, minus the mean progress, or minus its signs"

    @property
    def needs_origin(self) -> bool:
        return self.direction != "std"

    def _p(self, rows: Tensor) -> Tensor:
        if self.direction == "std":
            return -rows.std(0)
        mean = rows.mean(0)
        return -mean if self.direction == "unit" else -mean.sign()

    def forged(self, known: tuple[State, ...], context: AttackContext) -> State:
        centre = zeros(known[0]) if context.origin is None or self.direction == "std" else context.origin
        a: Tensor | float = 0.0
        along: Tensor | float = 0.0  # <x_i - mean, p>
        gram: Tensor | float = 0.0  # of x_i - mean
        for _, _, rows in blocks(known, centre):
            p, centred = self._p(rows), rows - rows.mean(0)
            a, along, gram = a + p @ p, along + centred @ p, gram + centred @ centred.T
        assert isinstance(a, Tensor)
        assert isinstance(along, Tensor)
        assert isinstance(gram, Tensor)
        gamma = 0.0 if a == 0 else float(self.largest(a, -along, gram))
        return forge(known, centre, lambda rows: rows.mean(0) + gamma * self._p(rows))

    @abstractmethod
    def largest(self, a: Tensor, b: Tensor, gram: Tensor) -> Tensor:
        """Return the largest gamma.

        Args:
            a: the squared length of p.
            b: inner products of p with the mean minus each message.
            gram: inner products of the messages minus their mean.
        """


class MinMax(_Farthest):
    """Far from the mean, but no farther from any benign message than the two farthest are from each other."""

    paper: ClassVar[str] = _PAPER

    def largest(self, a: Tensor, b: Tensor, gram: Tensor) -> Tensor:
        c = gram.diagonal()
        diameter = (c[:, None] + c - 2 * gram).max()
        return ((-b + (b**2 + a * (diameter - c).clamp(min=0)).sqrt()) / a).min()


class MinSum(_Farthest):
    """Far from the mean, with a sum of squared distances to the benign no larger than one of theirs.

    As deviations from a mean sum to zero, that is exactly as far from the mean as the closest benign message.
    """

    paper: ClassVar[str] = _PAPER

    def largest(self, a: Tensor, b: Tensor, gram: Tensor) -> Tensor:
        return (gram.diagonal().min() / a).sqrt()
