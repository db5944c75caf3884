"""Edge cases: unusual samples of one class get the label of another, where few honest clients disagree."""

from typing import ClassVar

import torch
from pydantic import PrivateAttr, model_validator
from torch import Tensor

from equipoise.attacks.base import PoisonContext, SuccessMeasure
from equipoise.attacks.labels import Label, Share, classes_of
from equipoise.attacks.scaling import Boosted
from equipoise.errors import EquipoiseError
from equipoise.torch_device import widened


class EdgeCase(Boosted):
    """The attackers' samples of a class that are farthest from its mean get another label; in simulations only.

    A simple version: the paper adds images from elsewhere, and here the attackers pool their own.
    """

    paper: ClassVar[str] = "Wang et al., Attack of the Tails, NeurIPS 2020"

    source: Label = 0
    "label of the samples that are changed"
    target: Label = 1
    "label that they get"
    tail: Share = 0.1
    "fraction of the attackers' samples of this label that are changed, those farthest from their mean"

    _mean: Tensor | None = PrivateAttr(default=None)
    _far: float = PrivateAttr(default=float("inf"))

    @model_validator(mode="after")
    def _differ(self) -> "EdgeCase":
        if self.source == self.target:
            raise EquipoiseError(f"attack.source and attack.target are both {self.source}; they must differ")
        return self

    @property
    def needs_labels(self) -> bool:
        return True

    @property
    def pools(self) -> bool:
        return True

    def prepared(self, x: Tensor, y: Tensor) -> "EdgeCase":
        own = widened(x[y == self.source].flatten(1)) if y.ndim == 1 else x[:0]
        found = self.model_copy()
        if len(own):
            found._mean = own.mean(0)
            distances = (own - found._mean).norm(dim=1).sort(descending=True).values
            count = round(self.tail * len(own))
            found._far = float(distances[count - 1]) if count else float("inf")
        return found

    def _in_the_tail(self, x: Tensor) -> Tensor:
        if self._mean is None:  # no attacker has a sample of this class
            return torch.zeros(len(x), dtype=torch.bool)
        far: Tensor = (widened(x.flatten(1)) - self._mean).norm(dim=1) >= self._far
        return far

    def samples(self, x: Tensor, y: Tensor, context: PoisonContext) -> tuple[Tensor, Tensor]:
        classes_of(context, y, "edge-case")
        return x, torch.where((y == self.source) & self._in_the_tail(x), self.target, y)

    def success(self) -> SuccessMeasure | None:
        return SuccessMeasure(
            self.target, self.source, described=f"the farthest {self.tail:g}", among=self._in_the_tail
        )
