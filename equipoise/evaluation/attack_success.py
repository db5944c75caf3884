"""How often models predict what attackers want: counts of each client, and the figures made of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.attacks import TriggeredSamples
from equipoise.losses import compared_outputs
from equipoise.storage.model_kinds import RIGHT, SUCCESS, UNMARKED
from equipoise.training.task import Task

COUNTS = ("samples", "hits", "unmarked", "right")
"""What is counted: samples; of them those that are predicted as the target, those that are without the trigger, and
those that are predicted right with it."""
_BATCH = 1024


class SuccessCounter:
    """Counts the success of an attack on clients' models."""

    def __init__(self, samples: TriggeredSamples, task: Task):
        """Create a counter.

        Args:
            samples: the samples that are predicted.
            task: the task, whose models predict.
        """
        self.samples, self.task = samples, task

    @torch.no_grad()
    def count(self, who: int, module: Callable[[Tensor], Tensor]) -> np.ndarray:
        """Return the counts of a client's samples, in the order of COUNTS.

        Args:
            who: the client.
            module: the model, on the task's device.
        """
        device = self.task.device
        x, marked, y = (t.to(device) for t in self.samples[who])
        hits = self._predicted(module, marked, y)
        measure = self.samples.measure
        plain, target = self._predicted(module, x, y) if measure.marks else hits, measure.target
        counts = (len(y), int((hits == target).sum()), int((plain == target).sum()), int((hits == y).sum()))
        return np.array(counts, dtype=np.int64)

    def _predicted(self, module: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        if not len(x):
            return y
        parts = zip(x.split(_BATCH), y.split(_BATCH), strict=True)
        return torch.cat([compared_outputs(self.task.predict(module, a), b).argmax(-1) for a, b in parts])

    def module(self, vector: Tensor, buffers: Tensor | None) -> nn.Module:
        """Return the module with these parameters and buffers, on the task's device."""
        return self.task.to_module(vector, buffers, self.task.device)


def success_figures(counts: np.ndarray, marks: bool) -> dict[str, Any]:
    """Return the figures of an attack's success, pooled over clients; some of them may have no samples.

    Args:
        counts: array (clients, 4) in the order of COUNTS.
        marks: whether the attack has a trigger, so that the same samples without it are a figure as well.
    """
    samples, hits, unmarked, right = (int(n) for n in counts.sum(0))
    if not samples:
        return {SUCCESS: None, RIGHT: None, **({UNMARKED: None} if marks else {})}
    figures = {SUCCESS: hits / samples, RIGHT: right / samples}
    return figures | ({UNMARKED: unmarked / samples} if marks else {})
