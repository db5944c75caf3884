"""An attack on data."""

from typing import ClassVar

import torch
from torch import Tensor

from equipoise.attacks.base import Attack
from equipoise.errors import EquipoiseError


class LabelPoison(Attack):
    """Training labels are replaced by random ones (by the other one where there are two), once and for all rounds."""

    paper: ClassVar[str] = "FLAME, Section VI-A"

    def labels(self, y: Tensor, classes: int | None, rng: torch.Generator) -> Tensor:
        if classes is None:
            raise EquipoiseError(
                "attack.name = 'label-poison' needs labels, and the targets of these data are numbers; "
                "choose an attack on messages, such as 'sign-flip'"
            )
        return 1 - y if classes == 2 else torch.randint(classes, y.shape, generator=rng)
