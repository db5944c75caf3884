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
    purged: "Moments | None" = None
    "of each group, the points outside of it that nothing may be fitted to that is judged on it; None: nowhere any"

    @classmethod
    def of(
        cls, x: Tensor, y: Tensor, groups: Sequence[slice | Tensor], purged: Sequence[Tensor] | None = None
    ) -> "Moments":
        """Compute the moments.

        Args:
            x: the features of each sample: a row, or one row per position.
            y: the targets, likewise.
            groups: the samples in each group.
            purged: the samples that are purged for each group, where any are.
        """
        x, y = widened(x), widened(y)
        dealt = [(x[group].flatten(0, -2), y[group].flatten(0, -2)) for group in groups]
        return cls(
            torch.stack([x.mT @ x for x, _ in dealt]),
            torch.stack([x.mT @ y for x, y in dealt]),
            torch.tensor([float(len(x)) for x, _ in dealt], dtype=x.dtype, device=x.device).reshape(-1, 1, 1),
            None if purged is None else cls.of(x, y, purged),
        )

    @classmethod
    def none(cls, inputs: int, outputs: int, like: Tensor) -> "Moments":
        """Return the moments of no points, as one group."""
        new = widened(like)
        return cls(new.new_zeros(1, inputs, inputs), new.new_zeros(1, inputs, outputs), new.new_zeros(1, 1, 1))

    @classmethod
    def stack(cls, clients: Iterable["Moments"]) -> "Moments":
        """Stack the moments of several clients."""
        each = list(clients)
        purged = [m.purged for m in each if m.purged is not None]  # of all clients, or of none
        xx, xy, n = (torch.stack([getattr(m, name) for m in each]) for name in ("xx", "xy", "n"))
        return cls(xx, xy, n, cls.stack(purged) if purged else None)

    def __add__(self, other: "Moments") -> "Moments":
        """Return the moments of both sets of points together, group by group."""
        assert self.purged is None
        assert other.purged is None
        return Moments(self.xx + other.xx, self.xy + other.xy, self.n + other.n)

    def to(self, dtype: torch.dtype) -> "Moments":
        """Return the moments in another number format."""
        purged = None if self.purged is None else self.purged.to(dtype)
        return Moments(self.xx.to(dtype), self.xy.to(dtype), self.n.to(dtype), purged)
