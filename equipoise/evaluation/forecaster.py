"""A client's model of time series, as it forecasts: the point, and an interval from the client's validation samples."""

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.data.federation import Federation
from equipoise.equilibrium import layers
from equipoise.evaluation.conformal import LEVEL, Forecasts, conformal_margin
from equipoise.training.task import Task

_BATCH = 512


class Forecaster:
    """Forecasts with intervals, in the units of the model."""

    def __init__(self, task: Task, module: nn.Module, federation: Federation, who: int, level: float = LEVEL):
        """Compute the margins of a client's intervals.

        Args:
            task: the task that the module was trained for.
            module: the module that the client predicts with.
            federation: the clients and their data, on the CPU, as the module takes them.
            who: the client.
            level: the probability of an interval.
        """
        self.task, self.module, self.federation = task, module.eval(), federation
        for _, layer in layers(module):
            layer.quiet = True  # the run has reported its solves
        x, y = federation.gather(torch.from_numpy(federation.validation[who]))
        self.margin = conformal_margin(self._raw(x), y.double().reshape(len(y), self.steps).numpy(), level)

    @property
    def steps(self) -> int:
        """Return the number of steps of the horizon."""
        return self.task.sample[1][0].numel()

    def of(self, samples: np.ndarray) -> Forecasts:
        """Return the forecasts of some samples of the federation."""
        return self.forecast(self.federation.gather(torch.from_numpy(samples))[0])

    def forecast(self, x: Tensor) -> Forecasts:
        """Return the forecasts for these inputs."""
        return self._raw(x).widened(self.margin)

    @torch.no_grad()
    def _raw(self, x: Tensor) -> Forecasts:
        """Return what the model says; without quantiles, intervals are single points."""
        parts = [self.task.predict(self.module, part).double() for part in x.split(_BATCH)]
        if not len(x):
            nothing = np.empty((0, self.steps))
            return Forecasts(nothing, nothing, nothing)
        output, pinball = torch.cat(parts), self.task.loss.pinball
        if pinball is None:
            point = output.reshape(len(x), -1).numpy()
            return Forecasts(point, point, point)
        quantiles = pinball.ordered(output).numpy()
        return Forecasts(quantiles[..., pinball.median], quantiles[..., 0], quantiles[..., -1])
