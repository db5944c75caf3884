"""Splits of time series: models train on the past and are scored on the future."""

from collections.abc import Sequence

import numpy as np

from equipoise.data.federation import split_sizes


def parts_in_time(first: np.ndarray, last: np.ndarray, split: Sequence[float]) -> np.ndarray:
    """Assign windows of a time series to training, validation and test.

    Args:
        first: the first moment that each window predicts, in ascending order.
        last: the last moment that each window predicts.
        split: the fractions of training, validation and test.

    Returns:
        0, 1 or 2 (train, validation, test) for each window, or -1 if it predicts a moment that a later part predicts
        too: targets of a later part must not be seen in an earlier one.
    """
    part = np.repeat(np.arange(3), split_sizes(len(first), split))
    for later in (1, 2):
        if (part == later).any():
            part[(part < later) & (last >= first[part == later].min())] = -1
    return part
