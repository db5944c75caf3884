"""How the server makes one message of many."""

import torch

from equipoise.state import State, Uploads


def mean(uploads: Uploads) -> State:
    """The weighted mean of every field of the message."""
    weights = uploads.weights()
    reduced = State()
    for name in uploads.fields():
        rows = uploads.stacked(name)
        reduced[name] = torch.tensordot(weights.to(rows.dtype), rows, dims=1)
    return reduced
