"""Predictions on the test samples of all clients, from which figures pooled over clients are made."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from equipoise.data.federation import Federation
from equipoise.errors import EquipoiseError
from equipoise.metrics import MOST_OUTPUTS, MetricCollection, Predictions, SetMetric
from equipoise.training.task import Task


def check_room(federation: Federation, task: Task) -> None:
    """Raise an error if a metric needs more outputs of one client than can be kept."""
    if "outputs" not in task.metrics.needs:
        return
    most = int(np.argmax(federation.validation.lengths + federation.test.lengths))
    samples = int(federation.validation.lengths[most] + federation.test.lengths[most])
    if samples * task.outputs_per_sample > MOST_OUTPUTS:
        names = [m.name for m in task.metrics.metrics if isinstance(m, SetMetric) and m.need == "outputs"]
        raise EquipoiseError(
            f"{', '.join(names)}: all outputs of a client must be kept, and {federation.names[most]!r} has {samples} "
            f"samples with {task.outputs_per_sample} outputs each, more than {MOST_OUTPUTS} together; leave out the "
            "metric or, if it is your own, let it return one value per sample"
        )


class PooledPredictions(Protocol):
    """Gives the predictions of many clients as one."""

    def pooled(self, kinds: np.ndarray, counted: np.ndarray) -> Predictions:
        """Return the predictions on the test samples of some clients.

        Args:
            kinds: the kind of model that each client predicts with.
            counted: mask of the clients.
        """


class KeptPredictions:
    """What is kept of the predictions of one kind of model, one row per test sample."""

    def __init__(self, federation: Federation, metrics: MetricCollection, outputs_per_sample: int):
        """Create an empty table.

        Args:
            federation: the clients and their data.
            metrics: the metrics, which determine what is kept.
            outputs_per_sample: number of the model's outputs for a sample.
        """
        self.test, self.needs = federation.test, set(metrics.needs)
        if len(self.test.flat) * outputs_per_sample > MOST_OUTPUTS:
            self.needs.discard("outputs")
        if "confidence" in self.needs:
            self.needs.add("classes")
        self.arrays: dict[str, np.ndarray] = {}

    def write(self, who: int, predictions: Predictions) -> None:
        """Keep the predictions of one client's model on its test samples."""
        end = self.test.ends[who]
        for name in sorted(self.needs & predictions.arrays.keys()):
            rows = predictions.arrays[name]
            if name not in self.arrays:
                self.arrays[name] = np.zeros((len(self.test.flat), *rows.shape[1:]), rows.dtype)
            self.arrays[name][end - len(rows) : end] = rows

    def rows(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """Return the rows of the test samples of some clients, for other processes."""
        rows = self._samples(clients)
        return {f"kept.{name}": torch.from_numpy(array[rows]) for name, array in self.arrays.items()}

    def take(self, clients: Sequence[int], tensors: dict[str, Tensor]) -> None:
        """Take what `rows` returned for these clients in another process."""
        for name in sorted(self.needs):
            if (found := tensors.get(f"kept.{name}")) is not None:
                if name not in self.arrays:
                    self.arrays[name] = np.zeros((len(self.test.flat), *found.shape[1:]), found.numpy().dtype)
                self.arrays[name][self._samples(clients)] = found.numpy()

    def _samples(self, clients: Sequence[int]) -> np.ndarray:
        """Return the positions of these clients' test samples among all of them."""
        test = self.test
        spans = [np.arange(test.ends[who] - test.lengths[who], test.ends[who]) for who in clients]
        return np.concatenate([np.empty(0, np.int64), *spans])

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        return {f"kept.{name}": torch.from_numpy(array) for name, array in self.arrays.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        found = {name: tensors[f"kept.{name}"] for name in self.needs if f"kept.{name}" in tensors}
        self.arrays = {name: tensor.numpy().copy() for name, tensor in found.items()}


class SimulatedPredictions:
    """The kept predictions of all kinds of models in a simulation."""

    def __init__(self, federation: Federation, outputs: int, kept: dict[str, KeptPredictions]):
        """Combine the tables.

        Args:
            federation: the clients and their data.
            outputs: number of the model's outputs.
            kept: the table of each kind of model.
        """
        self.federation, self.outputs, self.kept = federation, outputs, kept

    def pooled(self, kinds: np.ndarray, counted: np.ndarray) -> Predictions:
        test = self.federation.test
        sample_kinds = np.repeat(kinds, test.lengths)
        rows = np.flatnonzero(np.repeat(counted, test.lengths))
        used = {str(kind): self.kept[str(kind)].arrays for kind in np.unique(sample_kinds[rows])}
        arrays = {"targets": self.federation.y.numpy()[test.flat[rows]]}
        names = set.intersection(*(set(kept) for kept in used.values())) if used else set()
        for name in sorted(names):
            (_, first), *others = used.items()
            arrays[name] = first[name][rows]
            for kind, kept in others:
                own = sample_kinds[rows] == kind
                arrays[name][own] = kept[name][rows[own]]
        return Predictions(arrays, self.outputs)
