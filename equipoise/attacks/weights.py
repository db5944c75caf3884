"""Attackers that lie about their weight in the average."""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import field_validator, model_validator
from torch import Tensor

from equipoise.attacks.base import Attack, AttackContext, PoisonContext, SuccessMeasure
from equipoise.attacks.nested import inner_table, read_inner
from equipoise.errors import EquipoiseError
from equipoise.settings import Positive
from equipoise.state import State


class WeightInflation(Attack):
    """Claims a larger weight in the average, and sends the message of another attack, or the honest one."""

    factor: Positive = 1000.0
    "factor of the weight"
    claim: Positive | None = None
    "the weight itself (usually a number of samples), in place of a factor"
    inner: Attack | None = None
    "the attack on messages or samples that comes with it, such as { name = 'ipm', epsilon = 4 }; by default none"

    @field_validator("inner", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return read_inner(value, "attack.inner")

    @model_validator(mode="after")
    def _nests_once(self) -> "WeightInflation":
        if isinstance(self.inner, WeightInflation):
            raise EquipoiseError("attack.inner is itself 'weight-inflation'; give it another attack, or none")
        return self

    def table(self) -> dict[str, Any]:
        return super().table() | ({"inner": inner_table(self.inner)} if self.inner is not None else {})

    @property
    def needs_weights(self) -> bool:
        return True

    @property
    def needs_origin(self) -> bool:
        return self.inner is not None and self.inner.needs_origin

    @property
    def pools(self) -> bool:
        return self.inner is not None and self.inner.pools

    def prepared(self, x: Tensor, y: Tensor) -> "WeightInflation":
        return self if self.inner is None else self.model_copy(update={"inner": self.inner.prepared(x, y)})

    @property
    def needs_labels(self) -> bool:
        return self.inner is not None and self.inner.needs_labels

    def notes(self, clients: int, malicious: int) -> list[str]:
        return [] if self.inner is None else self.inner.notes(clients, malicious)

    def messages(self, context: AttackContext) -> Sequence[State]:
        return context.own if self.inner is None else self.inner.messages(context)

    def weights(self, context: AttackContext) -> Sequence[Tensor | None]:
        claimed = (None if w is None else w * self.factor for w in context.weights)
        if self.claim is None:
            return list(claimed)
        return [None if w is None else torch.full_like(w, self.claim) for w in context.weights]

    def remember(self, context: AttackContext) -> State:
        return context.memory if self.inner is None else self.inner.remember(context)

    def samples(self, x: Tensor, y: Tensor, context: PoisonContext) -> tuple[Tensor, Tensor]:
        return (x, y) if self.inner is None else self.inner.samples(x, y, context)

    def success(self) -> SuccessMeasure | None:
        return None if self.inner is None else self.inner.success()
