"""Windows of time series that are near a held-out block: what may not be learned from if the block is to judge it.

Windows that begin within the same few hours forecast the same values. A model that is fitted to a value and then judged
by it knows the answer, so those windows are purged from its training. That a window reads values which a held-out one
forecasts is no such thing: they are the past when it forecasts, and what is learned from it is how later values follow
from them. So there is no further gap (Bergmeir, Hyndman and Koo, 2018, for models of a series' own past).
"""

from collections.abc import Sequence

import numpy as np

from equipoise.data.series_facts import SeriesFacts


def purged_windows(series: SeriesFacts | None, samples: np.ndarray, blocks: Sequence[slice]) -> list[np.ndarray] | None:
    """Return, for each block of samples, which samples outside of it forecast a value that one in it forecasts too.

    Args:
        series: the series that the samples are windows of, if they are.
        samples: indices of the samples.
        blocks: the blocks, as parts of `samples`.

    Returns:
        Positions in `samples` for each block; None where no two windows can have such a value in common.
    """
    if series is None or series.horizon == 1 or len(blocks) < 2:
        return None
    found = []
    for block in blocks:
        near = series.share_targets(samples, samples[block])
        near[block] = False
        found.append(np.flatnonzero(near))
    return found
