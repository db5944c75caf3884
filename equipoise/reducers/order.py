"""Order statistics of messages: medians, and the places of the lowest scores."""

from torch import Tensor

from equipoise.torch_device import widened


def median(rows: Tensor) -> Tensor:
    """Return the median of each column; of two middle values their mean (torch.median takes the lower one)."""
    ordered, half = rows.sort(dim=0).values, (len(rows) - 1) // 2
    return (ordered[half] + ordered[-1 - half]) / 2


def lowest(scores: Tensor, count: int) -> Tensor:
    """Return the weights of a mean over the lowest scores; messages that tie for the last places share them."""
    last = scores.sort().values[count - 1]
    ties = (scores - last).abs() <= 1e-9 * last
    below = (scores < last) & ~ties
    left = count - below.sum()
    return (widened(below) + widened(ties) * left / ties.sum()) / count
