"""Auxiliary losses: what layers add to the loss of a training step, beside the loss of the outputs."""

import warnings
from typing import Any

from torch import Tensor, nn

from equipoise.equilibrium.solve_warnings import user_stack_level

_MANY_UNCOLLECTED = 100  # a model may call a layer often, such as for every step of a sequence; rarely so often


class AuxiliaryLosses:
    """The losses of a layer's calls in training since they were last collected."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self._warned = False

    def add(self, loss: Tensor) -> None:
        """Add the loss of one call; each holds the memory of a backward pass, so somebody must collect them."""
        self.losses.append(loss)
        if len(self.losses) >= _MANY_UNCOLLECTED and not self._warned:
            self._warned = True
            warnings.warn(
                f"a layer has {_MANY_UNCOLLECTED} auxiliary losses that have not been used yet, and each holds memory; "
                "add auxiliary_loss(model) to the loss of every training step",
                stacklevel=user_stack_level(),
            )

    def take(self) -> Tensor | None:
        """Return the sum of the losses, or None if there are none, and forget them."""
        losses, self.losses = self.losses, []
        return _sum(losses)


def auxiliary_layers(module: nn.Module) -> list[Any]:
    """Return the layers of a module that have a method `auxiliary_loss`."""
    return [layer for layer in module.modules() if callable(getattr(layer, "auxiliary_loss", None))]


def auxiliary_loss(module: nn.Module | list[Any]) -> Tensor | None:
    """Return the sum of the auxiliary losses of the last forward pass, which belongs to the loss of a training step.

    A layer takes part if it has a method `auxiliary_loss()` that returns its loss, or None, and forgets it. The result
    is None if no layer has one, as in evaluation.

    Args:
        module: the model, or its `auxiliary_layers`.
    """
    found = [
        layer.auxiliary_loss() for layer in (auxiliary_layers(module) if isinstance(module, nn.Module) else module)
    ]
    return _sum([loss for loss in found if loss is not None])


def _sum(losses: list[Tensor]) -> Tensor | None:
    total = None
    for loss in losses:
        total = loss if total is None else total + loss
    return total
