"""The link between a client's network and the head that the cells fit: moments of the data, and whole models."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from equipoise.algorithms.learn2pfed.cells import Fit
from equipoise.algorithms.learn2pfed.learnables import Layout
from equipoise.algorithms.local_data import LocalData
from equipoise.parameter_space import ParameterSpace
from equipoise.state import State


def network_with_head(layout: Layout, space: ParameterSpace, client: State, matrices: Tensor) -> Tensor:
    """Return the client's network with the last of these matrices as its head."""
    head = layout.head.vector(matrices[..., -1, :, :])
    return space.join(space.body(client.network), head) if space.body_size else head


def measure(model: Tensor, client: State, data: LocalData, outer: str, folds: int) -> State:
    """Add the moments of what the head reads to a client's state.

    Args:
        model: the client's network.
        client: its state.
        data: its data.
        outer: the samples on which the learnables are judged: "train", "validation" or "folds".
        folds: number of folds.
    """
    seen = data.moments(model, groups=folds if outer == "folds" else 1).to(model.dtype)
    judged = data.moments(model, of="validation").to(model.dtype) if outer == "validation" else seen
    xx, xy, n = seen.xx, seen.xy, judged.n.sum(-3, keepdim=True).clamp(min=1)
    outer_xx, outer_xy = judged.xx / n, judged.xy / n
    if outer == "folds":
        xx, xy = (torch.cat([m.sum(-3, keepdim=True) - m, m.sum(-3, keepdim=True)], dim=-3) for m in (xx, xy))
        # The network that is fitted to all samples is judged on none.
        outer_xx, outer_xy = (pad(m, (0, 0, 0, 0, 0, 1)) for m in (outer_xx, outer_xy))
    return State(client, **Fit.of(xx, xy)._asdict(), outer_xx=outer_xx, outer_xy=outer_xy)
