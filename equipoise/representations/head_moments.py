"""Second moments of what a linear head reads, enough to fit it by least squares."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.torch_device import widened


@dataclass(frozen=True)
class Moments:
    """All that the squared errors of a linear head depend on, for each group of a client's points.

    X are the features, one row per point, with a last column of ones if the head has a bias; Y are the targets. The
    leading axes are that of a stack of clients, if there is one, then that of the groups.
    """

    xx: Tensor
    "X'X"
    xy: Tensor
    "X'Y"
    n: Tensor
    "number of points, of shape (..., groups, 1, 1)"

    @classmethod
    def of(cls, x: Tensor, y: Tensor, groups: Sequence[slice | Tensor]) -> "Moments":
        """Compute the moments.

        Args:
            x: the features of each sample: a row, or one row per position.
            y: the targets, likewise.
            groups: the samples in each group.
        """
        x, y = widened(x), widened(y)
        dealt = [(x[group].flatten(0, -2), y[group].flatten(0, -2)) for group in groups]
        return cls(
            torch.stack([x.mT @ x for x, _ in dealt]),
            torch.stack([x.mT @ y for x, y in dealt]),
            torch.tensor([float(len(x)) for x, _ in dealt], dtype=x.dtype, device=x.device).reshape(-1, 1, 1),
        )

    @classmethod
    def none(cls, inputs: int, outputs: int, like: Tensor) -> "Moments":
        """Return the moments of no points, as one group."""
        new = widened(like)
        shapes = ((1, inputs, inputs), (1, inputs, outputs), (1, 1, 1))
        return cls(*(new.new_zeros(shape) for shape in shapes))

    @classmethod
    def stack(cls, clients: Iterable["Moments"]) -> "Moments":
        """Stack the moments of several clients."""
        each = [(m.xx, m.xy, m.n) for m in clients]
        return cls(*(torch.stack(column) for column in zip(*each, strict=True)))

    def to(self, dtype: torch.dtype) -> "Moments":
        """Return the moments in another number format."""
        return Moments(self.xx.to(dtype), self.xy.to(dtype), self.n.to(dtype))
