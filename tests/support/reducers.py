"""Messages for tests of reducers, and every reducer with settings that suit any number of messages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.reducers import REDUCERS, Bulyan, FlameFilter, FLTrust, Reducer, ReductionContext
from equipoise.state import RoundUploads, State, Upload, Uploads

QUIET: dict[str, Reducer] = {name: cls() for name, cls in REDUCERS.items()} | {
    "bulyan": Bulyan(malicious=0.08),  # which it bears with any number of messages up to 12
    "flame-filter": FlameFilter(of="difference", noise=0.0),
    "fltrust": FLTrust(root="0"),
}
"""Every reducer, without noise."""
HONEST = "client-0"
IN_RUNS: dict[str, Reducer] = {name: cls() for name, cls in REDUCERS.items()} | {
    "bulyan": QUIET["bulyan"],
    "fltrust": FLTrust(root=HONEST),
}
"""Every reducer for runs in which all clients take part in every round, and one client is known to be honest."""


def uploads(rows: Tensor, weights: Sequence[float] | None = None, who: Sequence[int] | None = None) -> Uploads:
    """Messages of two fields, the first two coordinates in one and the others in the other."""
    found = []
    for k, row in enumerate(rows):
        weight = None if weights is None else torch.tensor([weights[k]], dtype=rows.dtype)
        found.append(Upload(State(a=row[:2], b=row[2:]), weight=weight))
    return RoundUploads(tuple(who or range(len(rows))), tuple(found))


def split(row: Tensor) -> State:
    return State(a=row[:2], b=row[2:])


def reduced(
    reducer: Reducer,
    rows: Tensor,
    weights: Sequence[float] | None = None,
    *,
    who: Sequence[int] | None = None,
    origin: Tensor | None = None,
    memory: State | None = None,
    **context: Any,
) -> Tensor:
    """Reduce rows; the origin is zero unless it is given."""
    return with_memory(reducer, rows, weights, who=who, origin=origin, memory=memory, **context)[0]


def with_memory(
    reducer: Reducer,
    rows: Tensor,
    weights: Sequence[float] | None = None,
    *,
    who: Sequence[int] | None = None,
    origin: Tensor | None = None,
    memory: State | None = None,
    **context: Any,
) -> tuple[Tensor, State]:
    """Reduce rows, and return the result with what the rule remembers."""
    sent = uploads(rows, weights, who)
    if memory is None:
        memory = reducer.memory(sent.like, len(rows)) if reducer.remembers else State()
    begun = split(torch.zeros_like(rows[0]) if origin is None else origin)
    message, after = reducer.apply(sent, ReductionContext(begun, memory, **context))
    return torch.cat([message.a, message.b]), after
