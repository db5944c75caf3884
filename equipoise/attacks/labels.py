"""An attack on training labels."""

from typing import ClassVar

import torch
from torch import Tensor

from equipoise.attacks.base import Attack
from equipoise.errors import EquipoiseError


class LabelPoison(Attack):
    """Random training labels (flipped if there are two classes), drawn once for all rounds."""

    paper: ClassVar[str] = "FLAME, Section VI-A"

    def labels(self, y: Tensor, classes: int | None, rng: torch.Generator) -> Tensor:
        if classes is None:
            raise EquipoiseError(
                "attack.name = 'label-poison' needs labels, but the targets of these data are numbers; "
                "choose an attack on messages, such as 'sign-flip'"
            )
        return 1 - y if classes == 2 else torch.randint(classes, y.shape, generator=rng)
