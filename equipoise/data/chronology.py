"""Windows over something that goes on in time: who learns from the past is scored on the future."""

from collections.abc import Sequence

import numpy as np

from equipoise.errors import EquipoiseError


def parts_in_time(first: np.ndarray, last: np.ndarray, length: int, split: Sequence[float]) -> np.ndarray:
    """0, 1 or 2 (train, validation, test) for windows that are scored on the moments `first` to `last` of `length`.

    -1 where a window reaches over a cut: trained on, it would show what is to be predicted later.
    """
    cuts = [round(length * split[0]), round(length * (split[0] + split[1]))]
    part = np.searchsorted(cuts, first, side="right")
    return np.where(np.searchsorted(cuts, last, side="right") == part, part, -1)


def training_end(length: int, split: Sequence[float]) -> int:
    """How many of the first moments belong to the training part."""
    return round(length * split[0])


def nobody(unit: str, needed: int) -> EquipoiseError:
    return EquipoiseError(f"no {unit} is long enough: a training sample needs {needed} values in a row")
