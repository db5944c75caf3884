"""The scores of a model on samples, which are filled batch by batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from equipoise.losses import Loss
from equipoise.metrics import MetricCollection, PredictionRecord, Predictions, keep


@dataclass(frozen=True)
class BatchScores:
    """The scores of a batch."""

    values: np.ndarray
    "array with one column per sample: the loss, then every metric that is a mean over samples"
    kept: Mapping[str, np.ndarray]
    "what is kept of the predictions, one row per sample"

    def __getitem__(self, samples: slice) -> "BatchScores":
        """Return the scores of some of the samples."""
        return BatchScores(self.values[:, samples], {name: rows[samples] for name, rows in self.kept.items()})


def score_batch(loss: Loss, metrics: MetricCollection, output: Tensor, target: Tensor) -> BatchScores:
    """Return the scores of a batch.

    Args:
        loss: the loss.
        metrics: the metrics.
        output: the model's outputs.
        target: the targets.
    """
    values = [loss.of_each(output, target), *(metric.each(output, target) for metric in metrics.means)]
    kept = keep(metrics.needs, output, target) if metrics.needs else {}
    return BatchScores(np.stack([v.double().numpy() for v in values]), kept)


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

    def __init__(self, metrics: MetricCollection, samples: int):
        self.values = np.empty((1 + len(metrics.means), samples))
        self.record = PredictionRecord(metrics.needs, samples, metrics.outputs) if metrics.needs else None

    def write(self, first: int, batch: BatchScores) -> None:
        """Write the scores of a batch, whose first sample has this position."""
        self.values[:, first : first + batch.values.shape[1]] = batch.values
        if self.record is not None:
            self.record.write(first, batch.kept)

    def scores(self) -> SampleScores:
        """Return the scores, after all batches."""
        return SampleScores(self.values, None if self.record is None else self.record.predictions())
