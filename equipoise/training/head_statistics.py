"""Statistics of one client's representations: moments of the inputs of its head, and sums by class."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.errors import EquipoiseError
from equipoise.representations.head_features import HeadTargets
from equipoise.representations.head_moments import Moments
from equipoise.representations.linear_head import linear_head
from equipoise.representations.points import ForwardHook
from equipoise.training.task import Task

_SAMPLES_AT_ONCE = 512
Forward = Callable[[Tensor], Tensor]


def client_moments(task: Task, forward: Forward, module: nn.Module, x: Tensor, y: Tensor, groups: int) -> Moments:
    """Compute the second moments of the inputs of the head of `module`.

    Args:
        task: the task that the module is trained for.
        forward: runs the module on inputs.
        module: the module whose head is observed.
        x: inputs of the client's samples.
        y: their targets.
        groups: number of groups into which the samples are divided.
    """
    inputs, outputs, bias = linear_head(task.space)
    targets = HeadTargets(y)
    if len(y):
        features, _ = targets.look(partial(task.predict, forward), module.get_submodule(task.head or ""), x)
        features = features.to(task.dtype)
    else:
        features = x.new_empty((0, inputs - bias), dtype=task.dtype)
    if bias:
        features = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
    return Moments.of(features, targets.values(y, outputs, task.dtype), groups)


def client_class_sums(
    task: Task, forward: Forward, module: nn.Module, x: Tensor, y: Tensor, of: Callable[[Tensor], Tensor], at: str
) -> Tensor:
    """Sum `of(representations)` over the samples of each class; see `LocalData.class_sums`."""
    if y.is_floating_point() or y.ndim != 1:
        raise EquipoiseError("the algorithm works class by class and needs data with one label per sample")
    total: Tensor | None = None
    hook = ForwardHook(module, (at,), task.head)
    try:
        with torch.no_grad():
            for part_x, part_y in zip(x.split(_SAMPLES_AT_ONCE), y.split(_SAMPLES_AT_ONCE), strict=True):
                task.predict(forward, part_x)
                rows = of(hook.take()[0])
                members = nn.functional.one_hot(part_y.long(), task.outputs).to(rows.dtype)
                total = members.mT @ rows if total is None else total + members.mT @ rows
    finally:
        hook.close()
    assert total is not None
    return total
