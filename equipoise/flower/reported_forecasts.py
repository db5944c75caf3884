"""The errors of forecasts, which clients compute in the data's own unit and report as sums at the end of a run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.data.federation import Federation
from equipoise.evaluation.forecast_errors import ForecastErrors
from equipoise.evaluation.forecast_scores import NAIVE, ForecastRow, ForecastScores, score_client
from equipoise.evaluation.forecaster import Forecaster
from equipoise.flower.codec import group, named
from equipoise.flower.forecast_checks import check_forecasts
from equipoise.flower.protocol import FORECASTS, forecast_kinds
from equipoise.training.task import Task

_INTERVALS = ("coverage", "width")


def reported(task: Task, federation: Federation, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return what a client reports of its forecasts: nothing if its samples are not windows of time series.

    Args:
        task: the task that the models were trained for.
        federation: the client's data, as models take them.
        modules: the modules that it predicts with, by the kind of model.
    """
    if federation.series is None:
        return {}
    kinds = forecast_kinds(modules)
    forecasters = {kind: Forecaster(task, module, federation, 0) for kind, module in modules.items() if kind in kinds}
    return {row.model: _numbers(row) for row in score_client(federation, 0, forecasters, ())}


def _numbers(row: ForecastRow) -> Tensor:
    """Return the sums of a row and the figures of its intervals, NaN where there are none, as one tensor."""
    found = (row.intervals.get(name) for name in _INTERVALS)
    intervals = [np.nan if figure is None else figure for figure in found]
    return torch.from_numpy(np.concatenate([row.errors.numbers(), intervals]))


@dataclass
class ReportedForecasts:
    """The errors of forecasts that clients reported, by the clients' names."""

    unit: str = ""
    "unit of the data"
    step: int = 60
    "minutes between two values"
    horizon: int = 0
    "number of values that a sample forecasts; 0: the samples are not windows of time series"
    numbers: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    "what each client reported of each model and of each naive forecast"

    def add(self, name: str, forecasts: Mapping[str, Tensor], models: Collection[str], test: int) -> None:
        """Add what a client reported; raise RejectedMessage if it is impossible.

        Args:
            name: the client's name.
            forecasts: the numbers of each model and each naive forecast; empty if the client reports none.
            models: the kinds of models that it scored.
            test: the number of its test samples.
        """
        if not forecasts:
            return
        check_forecasts(forecasts, forecast_kinds(models), self.horizon, test)
        self.numbers[name] = {kind: numbers.numpy() for kind, numbers in forecasts.items()}

    def scores(self, unseen: Collection[str], malicious: Collection[str]) -> ForecastScores | None:
        """Return the scores of all clients that reported their forecasts, as in a simulation; None if none did.

        Args:
            unseen: names of the clients that do not train.
            malicious: names of the clients that do not count in figures.
        """
        rows = [
            self._row(name, kind, name in unseen, name not in malicious)
            for name in sorted(self.numbers)
            for kind in (*forecast_kinds(self.numbers[name]), *NAIVE)
        ]
        return ForecastScores(rows, self.unit, self.step, self.horizon) if rows else None

    def _row(self, name: str, kind: str, unseen: bool, counted: bool) -> ForecastRow:
        *sums, coverage, width = self.numbers[name][kind]
        found = {key: None if np.isnan(v) else float(v) for key, v in zip(_INTERVALS, (coverage, width), strict=True)}
        errors = ForecastErrors.of_numbers(np.array(sums), self.horizon)
        return ForecastRow(name, kind, unseen, counted, errors, {} if kind in NAIVE else found)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        return {
            name: tensor
            for who, numbers in self.numbers.items()
            for name, tensor in named(
                {f"{kind}.{who}": torch.from_numpy(n) for kind, n in numbers.items()}, FORECASTS
            ).items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what was saved."""
        self.numbers = {}
        for key, tensor in group(tensors, FORECASTS).items():
            kind, _, name = key.partition(".")
            self.numbers.setdefault(name, {})[kind] = tensor.numpy()
