"""FLTrust: each difference counts as much as it agrees with that of a client which the server trusts."""

from typing import ClassVar

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.reducers.base import ContextReducer
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.differences import Differences
from equipoise.state import State, Uploads
from equipoise.torch_device import wide_dtype

_RIGHT_ANGLE = 1e-6  # a smaller cosine may be rounding, which as the only one would get all the weight


class FLTrust(ContextReducer):
    """A mean of differences, each of the length of a trusted one and weighted by its cosine with it, if positive.

    d_0: the trusted difference; d_i: client i's; T_i = max(0, cos(d_i, d_0)). In the paper the server trains on clean
    samples of its own; here a client that is known to be honest takes its place, and its message is used for nothing
    else.
    """

    paper: ClassVar[str] = "Cao et al., FLTrust: Byzantine-robust FL via Trust Bootstrapping, NDSS 2021"
    needs_origin: ClassVar[bool] = True

    root: str = ""
    "name of the client that is trusted; it must take part in every round"

    @property
    def trusts(self) -> tuple[str, ...]:
        return (self.root,) if self.root else ()

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        d = Differences(uploads, context.origin_for(uploads, self))
        place = self._place(context.names(uploads))
        inner = torch.zeros(len(d), dtype=wide_dtype(d.device), device=d.device)
        squares = torch.zeros_like(inner)
        for rows in d.blocks():
            inner += rows @ rows[place]
            squares += rows.square().sum(1)
        return d.combined(trust_weights(inner, squares.sqrt(), place)), context.memory

    def _place(self, names: list[str]) -> int:
        if not self.root:
            raise EquipoiseError(
                "reducer.root is missing; FLTrust needs the name of a client that is known to be honest"
            )
        if self.root not in names:
            raise EquipoiseError(
                f"reducer.root = {self.root!r} sent no message; FLTrust needs one in every round, so participation "
                f"must be 1 and the name that of a client that trains, such as {min(names)!r}"
            )
        return names.index(self.root)


def trust_weights(inner: Tensor, norms: Tensor, root: int) -> Tensor:
    """Return the weights of differences.

    Args:
        inner: their inner products with the trusted one.
        norms: their lengths.
        root: which of them is trusted.
    """
    tiny = torch.finfo(norms.dtype).tiny
    cosine = (inner / norms.clamp(min=tiny) / norms[root].clamp(min=tiny)).clamp(0, 1)
    cosine = torch.where((norms > 0) & (norms[root] > 0) & (cosine > _RIGHT_ANGLE), cosine, 0)
    cosine[root] = 0  # its message is the measure, not one of the measured
    total = cosine.sum()
    if not total:
        return torch.zeros_like(cosine)
    return cosine / total * (norms[root] / norms.clamp(min=tiny))
