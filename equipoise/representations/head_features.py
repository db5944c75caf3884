"""The inputs and targets of a model's head, one row per point."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

READ_AT_ONCE = 512
"""Number of samples that run through a model in one call."""


class HeadTargets:
    """Converts samples to points.

    A text with one target per position is one point per position; a text with a single target is its last position.
    """

    def __init__(self, y: Tensor):
        """Find out from targets like `y` what the points are."""
        self.by_position = y.ndim == 2 and not y.is_floating_point()
        self.one_of_many = y.ndim == 1 and not y.is_floating_point()

    def targets(self, y: Tensor) -> Tensor:
        """Return the targets of the points: labels, or rows of numbers."""
        if not y.is_floating_point():
            return y.flatten()
        return y.flatten(1) if y.ndim > 1 else y[:, None]

    def values(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Return the targets as rows of numbers: for labels, 1 for the right class and 0 for the others.

        Args:
            y: the targets of the samples.
            outputs: number of classes.
            dtype: the number format of the result.
        """
        targets = self.targets(y)
        if not y.is_floating_point():
            targets = nn.functional.one_hot(targets.long(), outputs)
        return targets.to(dtype)

    @torch.no_grad()
    def look(self, call: Callable[[Tensor], Tensor], head: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the head reads, and the model's outputs, one row per point.

        Args:
            call: the model.
            head: its head.
            x: the inputs.
        """
        features, outputs = self.read(call, head, x)
        if self.by_position:
            return features.flatten(0, 1), outputs.flatten(0, 1)
        return features.flatten(1), outputs.reshape(len(x), outputs[0].numel())

    def read(self, call: Callable[[Tensor], Tensor], head: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the head reads, and the model's outputs, one entry per sample.

        Args:
            call: the model.
            head: its head.
            x: the inputs.
        """
        seen: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            outputs = torch.cat([call(part) for part in x.split(READ_AT_ONCE)])
        finally:
            handle.remove()
        features = torch.cat(seen)
        if self.one_of_many and outputs.ndim == 3:
            return features[:, -1:], outputs[:, -1:]
        return features, outputs
