"""Attacks on training labels."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from equipoise.attacks.base import Attack, PoisonContext, SuccessMeasure
from equipoise.errors import EquipoiseError

Label = Annotated[int, Field(ge=0, le=1_000_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]


def classes_of(context: PoisonContext, y: Tensor, name: str) -> int:
    """Return the number of classes, or raise an error if samples have no single label.

    Args:
        context: what the malicious client knows.
        y: its targets.
        name: the name of the attack.
    """
    if context.classes is None or y.is_floating_point():
        raise EquipoiseError(
            f"attack.name = {name!r} needs labels, but the targets of these data are numbers; "
            "choose an attack on messages, such as 'sign-flip'"
        )
    return context.classes


class LabelAttack(Attack):
    """Base of attacks on labels."""

    @property
    def needs_labels(self) -> bool:
        return True


class LabelPoison(LabelAttack):
    """Random training labels (flipped if there are two classes), drawn once for all rounds."""

    paper: ClassVar[str] = "FLAME, Section VI-A"

    def samples(self, x: Tensor, y: Tensor, context: PoisonContext) -> tuple[Tensor, Tensor]:
        classes = classes_of(context, y, "label-poison")
        return x, 1 - y if classes == 2 else torch.randint(classes, y.shape, generator=context.rng)


class LabelFlip(LabelAttack):
    """Training labels changed by a rule: to the mirrored or the next class, at random, or from one class to another."""

    mode: Literal["inverse", "targeted", "next", "random"] = "inverse"
    "y becomes C - 1 - y; `source` becomes `target`; y + 1 (mod C); or one of the other classes, drawn at random"
    source: Label | None = None
    "with mode = 'targeted': the label that is changed"
    target: Label | None = None
    "with mode = 'targeted': the label that it becomes"
    part: Share = 1.0
    "fraction of these samples whose label is changed"

    @model_validator(mode="after")
    def _names_both(self) -> "LabelFlip":
        given = [self.source is not None, self.target is not None]
        if self.mode == "targeted" and not all(given):
            raise EquipoiseError("attack.mode = 'targeted' needs attack.source and attack.target, two labels")
        if self.mode != "targeted" and any(given):
            raise EquipoiseError(f"attack.mode = {self.mode!r} has no source and target; they are for 'targeted'")
        if self.source is not None and self.source == self.target:
            raise EquipoiseError(f"attack.source and attack.target are both {self.source}; they must differ")
        return self

    def samples(self, x: Tensor, y: Tensor, context: PoisonContext) -> tuple[Tensor, Tensor]:
        classes = classes_of(context, y, "label-flip")
        if self.source is not None and self.target is not None:
            changed, concerned = torch.full_like(y, self.target), y == self.source
        else:
            concerned = torch.ones_like(y, dtype=torch.bool)
            if self.mode == "inverse":
                changed = classes - 1 - y
            elif self.mode == "next":
                changed = (y + 1) % classes
            else:
                changed = (y + 1 + torch.randint(max(classes - 1, 1), y.shape, generator=context.rng)) % classes
        if self.part < 1:
            rows = concerned.flatten().nonzero().flatten()
            chosen = rows[torch.randperm(len(rows), generator=context.rng)[: round(self.part * len(rows))]]
            concerned = torch.zeros_like(concerned.flatten()).index_fill_(0, chosen, True).reshape(y.shape)
        return x, torch.where(concerned, changed, y)

    def success(self) -> SuccessMeasure | None:
        return None if self.target is None else SuccessMeasure(self.target, self.source)
