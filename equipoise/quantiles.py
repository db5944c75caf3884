"""Forecasts of several quantiles: the loss whose minimum they are, and their place in a model's outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from equipoise.errors import EquipoiseError

QUANTILES = (0.1, 0.5, 0.9)
"""The quantiles that are forecast if none are named."""
_MEDIAN = 0.5


@dataclass(frozen=True)
class Pinball:
    """The pinball loss, whose expectation is smallest at the quantiles of the target.

    A model has one output for each number of the target and each quantile: all quantiles of the first number, then all
    of the second, and so on. The median is the forecast that is one number.
    """

    quantiles: tuple[float, ...] = QUANTILES
    "between 0 and 1, in ascending order, with 0.5 among them"

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantiles", checked_quantiles(self.quantiles))

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of each sample over quantiles and numbers."""
        target = target.reshape(len(target), -1)
        found = output.reshape(len(target), -1, len(self.quantiles))
        total = output.new_zeros(len(target))
        for k, quantile in enumerate(self.quantiles):  # not a tensor: a traced step must not hold it as a constant
            error = target - found[..., k]
            total = total + (quantile * error.clamp(min=0) + (1 - quantile) * (-error).clamp(min=0)).mean(-1)
        return total / len(self.quantiles)

    @property
    def median(self) -> int:
        """Return the position of the median among the quantiles."""
        return self.quantiles.index(_MEDIAN)

    @property
    def nominal(self) -> float:
        """Return the probability of the interval from the lowest to the highest quantile."""
        return self.quantiles[-1] - self.quantiles[0]

    def ordered(self, output: Tensor) -> Tensor:
        """Return the quantiles of each number, (samples, numbers, quantiles), sorted where they cross."""
        return output.reshape(len(output), -1, len(self.quantiles)).sort(-1).values

    def point(self, output: Tensor) -> Tensor:
        """Return the medians, one row of numbers per sample."""
        return self.ordered(output)[..., self.median]


def checked_quantiles(given: Sequence[float]) -> tuple[float, ...]:
    """Return quantiles, or raise an error if a model cannot forecast them."""
    try:
        found = tuple(float(value) for value in given)
    except (TypeError, ValueError):
        found = ()
    ascending = all(a < b for a, b in pairwise(found))
    if not found or not ascending or not 0 < found[0] <= found[-1] < 1 or _MEDIAN not in found:
        raise EquipoiseError(
            f"quantiles = {given!r} is not allowed; they must be between 0 and 1, in ascending order, with 0.5 among "
            f"them, such as {list(QUANTILES)}"
        )
    return found
