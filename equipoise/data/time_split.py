"""Windows over something that goes on in time: who learns from the past is scored on the future."""

from collections.abc import Sequence

import numpy as np

from equipoise.data.federation import split_sizes


def parts_in_time(first: np.ndarray, last: np.ndarray, split: Sequence[float]) -> np.ndarray:
    """0, 1 or 2 (train, validation, test) for windows in their order, which ask for the moments `first` to `last`.

    -1 for a window that asks for a moment which a later part asks for too: what is to be predicted later must not have
    been shown before.
    """
    part = np.repeat(np.arange(3), split_sizes(len(first), split))
    for later in (1, 2):
        if (part == later).any():
            part[(part < later) & (last >= first[part == later].min())] = -1
    return part
