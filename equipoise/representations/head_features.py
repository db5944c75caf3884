"""What the head of a model reads, and what it is to answer: a row a point."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

_BATCH = 512


class HeadTargets:
    """How samples become points.

    A text with a target a position is a point a position; one with a single target counts by its last position.
    """

    def __init__(self, y: Tensor):
        self.by_position = y.ndim == 2 and not y.is_floating_point()
        self.one_of_many = y.ndim == 1 and not y.is_floating_point()

    def targets(self, y: Tensor) -> Tensor:
        """Labels, or rows of numbers."""
        if not y.is_floating_point():
            return y.flatten()
        return y.flatten(1) if y.ndim > 1 else y[:, None]

    def values(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Rows of numbers to come near to: the targets, or 1 for the right class and 0 for the others."""
        targets = self.targets(y)
        if not y.is_floating_point():
            targets = nn.functional.one_hot(targets.long(), outputs)
        return targets.to(dtype)

    @torch.no_grad()
    def look(self, call: Callable[[Tensor], Tensor], head: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads when x goes through the model, and what the model answers."""
        seen: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            outputs = torch.cat([call(part) for part in x.split(_BATCH)])
        finally:
            handle.remove()
        features = torch.cat(seen)
        if self.by_position:
            return features.flatten(0, 1), outputs.flatten(0, 1)
        if self.one_of_many and outputs.ndim == 3:
            return features[:, -1], outputs[:, -1]
        return features.flatten(1), outputs.reshape(len(x), outputs[0].numel())
