"""The scores of a model on samples, which are filled batch by batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.losses import Loss
from equipoise.metrics import MetricCollection, PredictionRecord, Predictions, keep
from equipoise.torch_device import is_accelerator, widened

_VALUES = "values"


@dataclass(frozen=True)
class SampleScores:
    """The scores of a model on samples."""

    values: np.ndarray
    "array with one column per sample: the loss, then every metric that is a mean over samples"
    predictions: Predictions | None = None
    "what is kept of the predictions, if a metric needs all samples together"

    def __getitem__(self, samples: slice) -> "SampleScores":
        """Return the scores on some of the samples."""
        kept = None if self.predictions is None else self.predictions[samples]
        return SampleScores(self.values[:, samples], kept)

    @staticmethod
    def concatenate(parts: Sequence["SampleScores"]) -> "SampleScores":
        """Return the scores on the samples of all parts, in order."""
        kept = [part.predictions for part in parts if part.predictions is not None]
        values = np.concatenate([part.values for part in parts], axis=1)
        return SampleScores(values, Predictions.concatenate(kept) if kept else None)


class ScoreRecorder:
    """Room for the scores of a model on samples, filled batch by batch."""

    def __init__(self, loss: Loss, metrics: MetricCollection, samples: int):
        self.loss, self.metrics = loss, metrics
        self.values = np.empty((1 + len(metrics.means), samples))
        self.record = PredictionRecord(metrics.needs, samples, metrics.outputs) if metrics.needs else None
        self.waiting: list[tuple[int, dict[str, Tensor]]] = []
        "positions of batches whose scores are still on another device, and the scores"

    def add(self, first: int, output: Tensor, target: Tensor) -> None:
        """Score a batch, whose first sample has this position."""
        values = [self.loss.of_each(output, target), *(m.each(output, target) for m in self.metrics.means)]
        kept = keep(self.metrics.needs, output, target) if self.record is not None else {}
        if is_accelerator(output.device):
            # Copied all at once: the host would wait for the device with every copy.
            self.waiting.append((first, {_VALUES: torch.stack([widened(v) for v in values]).T, **kept}))
        else:
            self._write(first, [value.numpy() for value in values], {name: t.numpy() for name, t in kept.items()})

    def _write(self, first: int, values: Sequence[np.ndarray], kept: Mapping[str, np.ndarray]) -> None:
        for row, value in zip(self.values, values, strict=True):
            row[first : first + len(value)] = value
        if self.record is not None:
            self.record.write(first, kept)

    def fetch(self) -> None:
        """Copy what is on another device to the host, one copy for each kind of scores."""
        if not self.waiting:
            return
        sizes = np.cumsum([len(scored[_VALUES]) for _, scored in self.waiting])[:-1]
        fetched = {
            name: np.split(torch.cat([scored[name] for _, scored in self.waiting]).cpu().numpy(), sizes)
            for name in self.waiting[0][1]
        }
        values = fetched.pop(_VALUES)
        for k, (first, _) in enumerate(self.waiting):
            self._write(first, list(values[k].T), {name: pieces[k] for name, pieces in fetched.items()})
        self.waiting.clear()

    def copy(self, first: int, batch: "ScoreRecorder", rows: slice) -> None:
        """Copy some rows of a batch that was scored for several models together, to this position."""
        batch.fetch()
        values = batch.values[:, rows]
        self.values[:, first : first + values.shape[1]] = values
        if self.record is not None and batch.record is not None:
            self.record.write(first, {name: array[rows] for name, array in batch.record.arrays.items()})

    def scores(self) -> SampleScores:
        """Return the scores, after all batches."""
        self.fetch()
        return SampleScores(self.values, None if self.record is None else self.record.predictions())
