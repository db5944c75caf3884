"""What is kept of a model's predictions, for metrics that need all samples of a client at once."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.losses import compared_outputs
from equipoise.torch_device import widened

Need = Literal["classes", "confidence", "outputs"]
"""The predicted class; that and its probability; or all outputs."""
MOST_OUTPUTS = 1 << 24
"""Largest number of outputs that are kept at once, which bounds memory and checkpoints."""
_TARGETS = "targets"


def keep(needs: Collection[Need], output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return what is kept of a batch, one row per sample.

    Args:
        needs: what metrics need.
        output: the model's outputs.
        target: the targets.
    """
    kept = {_TARGETS: target}
    if "outputs" in needs:
        kept["outputs"] = output
    if "classes" in needs or "confidence" in needs:
        compared = compared_outputs(output, target)
        kept["classes"] = compared.argmax(-1).to(torch.int32)
        if "confidence" in needs:
            kept["confidence"] = widened(compared).softmax(-1).amax(-1)
    return kept


class PredictionRecord:
    """Room for what is kept of the predictions on some samples, filled batch by batch."""

    def __init__(self, needs: Collection[Need], samples: int, outputs: int):
        """Create an empty record.

        Args:
            needs: what metrics need.
            samples: number of samples.
            outputs: number of the model's outputs, which are classes where targets are classes.
        """
        self.needs, self.samples, self.outputs = needs, samples, outputs
        self.arrays: dict[str, np.ndarray] = {}

    def write(self, first: int, batch: Mapping[str, np.ndarray]) -> None:
        """Write what is kept of a batch, whose first sample has this position."""
        for name, rows in batch.items():
            if name not in self.arrays:
                self.arrays[name] = np.empty((self.samples, *rows.shape[1:]), rows.dtype)
            self.arrays[name][first : first + len(rows)] = rows

    def predictions(self) -> "Predictions":
        """Return the predictions, after all batches."""
        return Predictions(self.arrays, self.outputs)


class Predictions:
    """A model's predictions on some samples, as far as they are kept."""

    def __init__(self, arrays: Mapping[str, np.ndarray], outputs: int, confusion: np.ndarray | None = None):
        """Create predictions.

        Args:
            arrays: what is kept, one row per sample.
            outputs: number of the model's outputs.
            confusion: number of samples of each class and predicted class, if only that is known.
        """
        self.arrays, self.outputs, self._confusion = arrays, outputs, confusion

    def __getitem__(self, rows: slice) -> "Predictions":
        """Return the predictions on some of the samples."""
        return Predictions({name: array[rows] for name, array in self.arrays.items()}, self.outputs)

    @staticmethod
    def concatenate(parts: Sequence["Predictions"]) -> "Predictions":
        """Return the predictions on the samples of all parts, in order."""
        names = list(parts[0].arrays)
        return Predictions({n: np.concatenate([p.arrays[n] for p in parts]) for n in names}, parts[0].outputs)

    def has(self, need: Need) -> bool:
        """Tell whether a metric with this need can be computed."""
        return need in self.arrays or (need == "classes" and self._confusion is not None)

    @cached_property
    def finite(self) -> bool:
        """Tell whether all outputs, as far as they are kept, are finite numbers."""
        kept = (self.arrays[name] for name in ("outputs", "confidence") if name in self.arrays)
        return all(np.isfinite(array).all() for array in kept)

    @property
    def raw(self) -> tuple[Tensor, Tensor]:
        """Return outputs and targets as they are."""
        return self._tensor("outputs"), self._tensor(_TARGETS)

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.arrays[name]))

    @property
    def labels(self) -> Tensor:
        """Return the true classes, of all positions if there is one per position."""
        return self._tensor(_TARGETS).flatten()

    @property
    def classes(self) -> Tensor:
        """Return the predicted classes, as `labels`."""
        return self._tensor("classes").flatten().long()

    @property
    def confidence(self) -> Tensor:
        """Return the probabilities of the predicted classes, as `labels`."""
        return self._tensor("confidence").flatten()

    @cached_property
    def probabilities(self) -> Tensor:
        """Return the probability of every class, one row per label."""
        output, target = self.raw
        return compared_outputs(output, target).flatten(0, -2).double().softmax(-1)

    @cached_property
    def confusion(self) -> np.ndarray:
        """Return the number of labels of each true class (row) that were predicted as each class (column)."""
        if self._confusion is not None:
            return self._confusion
        from torchmetrics.functional.classification import multiclass_confusion_matrix  # importing it takes a second

        found = multiclass_confusion_matrix(self.classes, self.labels, self.outputs, validate_args=False)
        return found.numpy().astype(np.int64)

    @property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return outputs and targets as numbers, one row per sample."""
        output, target = (t.double().reshape(len(t), -1) for t in self.raw)
        return output, target
