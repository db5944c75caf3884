"""One client's representations: its samples as its head sees them, and sums by class."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.errors import EquipoiseError
from equipoise.representations.head_features import READ_AT_ONCE, HeadTargets
from equipoise.representations.head_problem import HeadSamples
from equipoise.representations.linear_head import linear_head
from equipoise.representations.points import ForwardHook
from equipoise.torch_device import wide_dtype
from equipoise.training.task import Task

Forward = Callable[[Tensor], Tensor]


def head_samples(task: Task, forward: Forward, module: nn.Module, x: Tensor, y: Tensor, count: int) -> HeadSamples:
    """Return a client's samples as the head of `module` sees them.

    Args:
        task: the task that the module is trained for.
        forward: runs the module on inputs.
        module: the module whose head is observed.
        x: inputs of the client's samples.
        y: their targets.
        count: number of samples that count.
    """
    _, outputs, bias = linear_head(task.space)
    with torch.no_grad():
        features, found = HeadTargets(y).read(partial(task.predict, forward), module.get_submodule(task.head or ""), x)
    features = features.to(task.dtype)
    if bias:
        features = torch.cat([features, torch.ones_like(features[..., :1])], dim=-1)
    return HeadSamples(features, y, count, (), found.shape[1:], outputs)


def pull_back(
    task: Task, forward: Forward, module: nn.Module, x: Tensor, y: Tensor, adjoint: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the features of some samples at a time, with autograd's record, and the derivatives with respect to them.

    Args:
        task: the task that the module is trained for.
        forward: runs the module on inputs.
        module: the module whose head is observed.
        x: inputs of the client's samples.
        y: their targets.
        adjoint: derivatives with respect to the `features` of `head_samples`.
    """
    head, targets = module.get_submodule(task.head or ""), HeadTargets(y)
    for part, bars in zip(x.split(READ_AT_ONCE), adjoint.split(READ_AT_ONCE), strict=True):
        with torch.enable_grad():
            features, _ = targets.read(partial(task.predict, forward), head, part)
        if features.requires_grad:  # a body may have parameters that the head does not depend on
            yield features, bars[..., : features.shape[-1]].to(features.dtype)


def mean_loss(task: Task, forward: Forward, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss over the samples of a client, of shape (1,); see `LocalData.loss`."""
    total = torch.zeros(1, dtype=wide_dtype(x.device), device=x.device)
    with torch.no_grad():
        for part_x, part_y in zip(x.split(READ_AT_ONCE), y.split(READ_AT_ONCE), strict=True):
            total += task.loss.of_each(task.predict(forward, part_x), part_y).sum()
    return (total / len(y)).to(task.dtype)


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
            for part_x, part_y in zip(x.split(READ_AT_ONCE), y.split(READ_AT_ONCE), strict=True):
                task.predict(forward, part_x)
                rows = of(hook.take()[0])
                members = nn.functional.one_hot(part_y.long(), task.outputs).to(rows.dtype)
                total = members.mT @ rows if total is None else total + members.mT @ rows
    finally:
        hook.close()
    assert total is not None
    return total
