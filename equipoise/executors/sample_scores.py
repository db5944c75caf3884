"""The scores of a model on samples, which are filled batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from equipoise.losses import Loss
from equipoise.metrics import MetricCollection, PredictionRecord, Predictions, keep


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

    def add(self, first: int, output: Tensor, target: Tensor) -> None:
        """Score a batch, whose first sample has this position."""
        rows = slice(first, first + len(target))
        self.values[0, rows] = self.loss.of_each(output, target).numpy()
        for k, metric in enumerate(self.metrics.means, start=1):
            self.values[k, rows] = metric.each(output, target).numpy()
        if self.record is not None:
            self.record.write(first, keep(self.metrics.needs, output, target))

    def copy(self, first: int, batch: "ScoreRecorder", rows: slice) -> None:
        """Copy some rows of a batch that was scored for several models together, to this position."""
        values = batch.values[:, rows]
        self.values[:, first : first + values.shape[1]] = values
        if self.record is not None and batch.record is not None:
            self.record.write(first, {name: array[rows] for name, array in batch.record.arrays.items()})

    def scores(self) -> SampleScores:
        """Return the scores, after all batches."""
        return SampleScores(self.values, None if self.record is None else self.record.predictions())
