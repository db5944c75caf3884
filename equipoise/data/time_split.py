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


def parts_at_cut(first: np.ndarray, last: np.ndarray, cut: int, split: Sequence[float]) -> np.ndarray:
    """Assign windows to parts where the test part begins at a given moment.

    Args:
        first: the first moment that each window predicts, in ascending order.
        last: the last moment that each window predicts.
        cut: the first moment of the test part.
        split: the fractions, of which those of training and validation divide what lies before.

    Returns:
        0, 1 or 2 for each window, or -1 as in `parts_in_time`.
    """
    part = np.where(first >= cut, 2, -1)
    _divide(part, last < cut, first, last, split)
    return part


def recent_parts(
    part: np.ndarray, begin: np.ndarray, first: np.ndarray, last: np.ndarray, history: range, split: Sequence[float]
) -> np.ndarray:
    """Assign windows to parts where only a short history before the test part may be used to learn from.

    Args:
        part: 2 for each window of the test part, which stays as it is.
        begin: the first moment that each window reads.
        first: the first moment that each window predicts, in ascending order.
        last: the last moment that each window predicts.
        history: the moments that may be used.
        split: the fractions, of which those of training and validation divide the windows in the history.

    Returns:
        0, 1 or 2 for each window, or -1 if it is not used.
    """
    recent = np.where(part == 2, 2, -1)
    _divide(recent, (part < 2) & (begin >= history.start) & (last < history.stop), first, last, split)
    return recent


def _divide(part: np.ndarray, among: np.ndarray, first: np.ndarray, last: np.ndarray, split: Sequence[float]) -> None:
    """Assign the windows `among` to training and validation in place."""
    learned = split[0] + split[1]
    part[among] = parts_in_time(first[among], last[among], (split[0] / learned, split[1] / learned, 0.0))
