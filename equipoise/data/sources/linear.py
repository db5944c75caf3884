"""Federated linear regression with orthogonal inputs, for which FLAME's fairness and robustness have closed forms."""

from typing import ClassVar

import numpy as np
import torch

from equipoise import randomness
from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest, Source
from equipoise.data.text_encoding import numbered
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, NonNegative, Number, Positive


class LinearRegression(Source):
    """Linear regression, y = X_i theta_i + noise, with X_i'X_i = N b I in each of the three parts of every client."""

    paper: ClassVar[str] = "FLAME, Appendix B: Propositions 2 and 3"
    draws: ClassVar[bool] = True

    dimension: Count = 10
    "length of theta_i"
    samples: Count = 100
    "N: number of samples of each client in each of the three parts; at least the dimension"
    b: Positive = 1.0
    "scale of the inputs: X_i'X_i = N b I"
    sigma: NonNegative = 0.1
    "standard deviation of the noise on y"
    spread: NonNegative = 1.0
    "standard deviation of the clients' theta_i around their common mean"
    common: Number = 1.0
    "value of every entry of that mean"

    def parameters(self, clients: int, seed: int) -> np.ndarray:
        """Return the true theta_i, one row per client."""
        rng = randomness.generator(seed, "linear parameters")
        return np.asarray(self.common + self.spread * rng.normal(size=(clients, self.dimension)))

    def load(self, ask: LoadRequest) -> Pool:
        if self.samples < self.dimension:
            raise EquipoiseError(
                f"data.samples = {self.samples} is less than data.dimension = {self.dimension}; "
                "X_i'X_i = N b I needs at least as many samples"
            )
        clients = ask.clients or 10
        theta, names = self.parameters(clients, ask.seed), numbered(clients)
        xs, ys = [], []
        for theta_i, name in zip(theta, names, strict=True):
            rng = randomness.generator(ask.seed, "linear", name)
            for _ in range(3):
                q, _ = np.linalg.qr(rng.normal(size=(self.samples, self.dimension)))
                x = np.sqrt(self.samples * self.b) * q
                xs.append(x)
                ys.append(x @ theta_i + self.sigma * rng.normal(size=self.samples))
        return Pool(
            x=torch.from_numpy(np.concatenate(xs)),
            y=torch.from_numpy(np.concatenate(ys)[:, None]),
            classes=None,
            owner=np.repeat(np.arange(clients), 3 * self.samples),
            names=tuple(names),
            part=np.tile(np.repeat(np.arange(3), self.samples), clients),
        )
