"""The attack that does nothing, as the control of all others."""

from typing import Any

from pydantic import field_validator
from torch import Tensor

from equipoise.attacks.base import Attack, SuccessMeasure
from equipoise.attacks.nested import inner_table, read_inner


class Control(Attack):
    """No attack: the clients that would be malicious are honest, and scores are still those of the others."""

    of: Attack | None = None
    "an attack with a target, such as { name = 'backdoor' }, whose success is measured without it: its floor"

    @field_validator("of", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return read_inner(value, "attack.of")

    def table(self) -> dict[str, Any]:
        return super().table() | ({"of": inner_table(self.of)} if self.of is not None else {})

    @property
    def pools(self) -> bool:
        return self.of is not None and self.of.pools

    def prepared(self, x: Tensor, y: Tensor) -> "Control":
        return self if self.of is None else self.model_copy(update={"of": self.of.prepared(x, y)})

    @property
    def needs_labels(self) -> bool:
        return self.of is not None and self.of.needs_labels

    def success(self) -> SuccessMeasure | None:
        return None if self.of is None else self.of.success()
