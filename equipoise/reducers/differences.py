"""Messages as differences from a point, such as their origin: norms, inner products and combinations of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.reducers.distances import LARGEST
from equipoise.state import State, Uploads
from equipoise.torch_device import CPU, wide_dtype, widened


@dataclass(frozen=True)
class Differences:
    """The differences d_i = x_i - o of messages x_i from a point o, some coordinates at a time."""

    uploads: Uploads
    point: State
    "o, with the fields of the messages"

    def __len__(self) -> int:
        return len(self.uploads)

    @property
    def device(self) -> torch.device:
        """Return where the messages are."""
        return next((t.device for t in self.uploads.like.values()), CPU)

    def blocks(self) -> Iterator[Tensor]:
        """Yield all differences, one row each, in float64; numbers whose squares would overflow are cut."""
        for name in self.uploads.like:
            yield from (rows for _, _, rows in self.field(name))

    def field(self, name: str, first: int = 0) -> Iterator[tuple[int, int, Tensor]]:
        """Yield blocks of a field from a coordinate on: its first coordinate, the one after its last, and its rows."""
        point = widened(self.point[name].flatten())
        for low, high in self.uploads.spans(name):
            if (low := max(low, first)) < high or not len(point):
                rows = widened(self.uploads.columns(name, low, high)) - point[low:high]
                yield low, high, rows.clamp(-LARGEST[rows.dtype], LARGEST[rows.dtype])

    def norms(self) -> Tensor:
        """Return the length of every difference."""
        total = torch.zeros(len(self), dtype=wide_dtype(self.device), device=self.device)
        for rows in self.blocks():
            total += rows.square().sum(1)
        return total.sqrt()

    def gram(self) -> Tensor:
        """Return the inner products of all differences."""
        total = torch.zeros(len(self), len(self), dtype=wide_dtype(self.device), device=self.device)
        for rows in self.blocks():
            total += rows @ rows.T
        return total

    def combined(self, weights: Tensor) -> State:
        """Return o plus the sum of all differences, each times its weight."""
        found, rest = self.uploads.combined(weights), 1 - weights.sum()
        return State({k: (t + rest * widened(self.point[k])).to(t.dtype) for k, t in found.items()})

    def each(self, function: Callable[[Tensor], Tensor]) -> State:
        """Return o plus what a function from blocks of differences to one row makes."""
        found = State()
        for name, t in self.uploads.like.items():
            moved = torch.cat([function(rows) for _, _, rows in self.field(name)]).reshape(t.shape)
            found[name] = (widened(self.point[name]) + moved).to(t.dtype)
        return found


def cosines(gram: Tensor) -> Tensor:
    """Return the cosines between rows from their inner products; a row of zeros has cosine 0 with all others."""
    norms = gram.diagonal().sqrt()
    unit = torch.where(norms > 0, 1 / norms.clamp(min=torch.finfo(norms.dtype).tiny), 0)
    found = ((gram + gram.T) / 2 * unit[:, None] * unit).clamp(-1, 1)
    return found.fill_diagonal_(1)


def clipping(norms: Tensor, bound: Tensor | float) -> Tensor:
    """Return the factors that cut lengths to at most a bound; 1 where the length is zero."""
    return torch.where(norms > bound, bound / norms.clamp(min=torch.finfo(norms.dtype).tiny), 1.0)
