"""Polynomials that share some coefficients: regression where it is known what clients have in common."""

from typing import ClassVar, Literal

import numpy as np
import torch

from equipoise import randomness
from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest, Source
from equipoise.data.text_encoding import numbered
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, NonNegative

BASE = np.array([0.0, -6.0, 18.0, -12.0])
"""The coefficients of 1, x, x^2 and x^3, which clients share or deviate from."""


class Polynomial(Source):
    """Noisy values of one cubic polynomial per client, with shared lower coefficients; inputs 1, x, x^2, x^3."""

    paper: ClassVar[str] = "Learn2pFed, Section IV-B: Settings 1, 2 and 3"
    draws: ClassVar[bool] = True

    setting: Literal[1, 2, 3] = 1
    "shared coefficients; 1: those of 1, x and x^2; 2: those of 1 and x; 3: that of 1"
    layout: Literal["alike", "segments"] = "alike"
    "distribution of x; alike: uniform on 0..1 for all; segments: sorted and cut into one interval per client"
    points: Count = 1000
    "number of training points of all clients together"
    noise: NonNegative = 0.1
    "standard deviation of the noise on training and validation points; test points have none"
    validation: Count = 20
    "number of validation points of each client, noisy, from where it trains"
    test: Count = 100
    "number of test points of each client, on all of 0..1, without noise"

    @property
    def shared(self) -> int:
        """Return the number of coefficients that all clients share."""
        return 4 - self.setting

    def coefficients(self, clients: int, seed: int) -> np.ndarray:
        """Return the coefficients a_i, one row per client."""
        a = np.tile(BASE, (clients, 1))
        rng = randomness.generator(seed, "polynomial coefficients")
        a[:, self.shared :] += rng.uniform(-10, 10, (clients, 4 - self.shared))
        return a

    def load(self, ask: LoadRequest) -> Pool:
        clients = ask.clients or 10
        if clients > self.points:
            raise EquipoiseError(f"data.points = {self.points} cannot be divided over {clients} clients")
        a = self.coefficients(clients, ask.seed)
        names = numbered(clients)
        spread = np.sort(randomness.generator(ask.seed, "polynomial points").uniform(0, 1, self.points))
        stretches = np.array_split(spread, clients)
        xs, ys, owner, parts = [], [], [], []
        for i, (a_i, name, stretch) in enumerate(zip(a, names, stretches, strict=True)):
            rng = randomness.generator(ask.seed, "polynomial", name)
            low, high = (stretch[0], stretch[-1]) if self.layout == "segments" else (0, 1)
            train = stretch if self.layout == "segments" else rng.uniform(0, 1, len(stretch))
            drawn = (train, rng.uniform(low, high, self.validation), rng.uniform(0, 1, self.test))
            for part, x in enumerate(drawn):
                features = x[:, None] ** np.arange(4)
                noise = self.noise * rng.normal(size=len(x)) if part < 2 else 0.0
                xs.append(features)
                ys.append(features @ a_i + noise)
                owner.append(np.full(len(x), i))
                parts.append(np.full(len(x), part))
        return Pool(
            x=torch.from_numpy(np.concatenate(xs)),
            y=torch.from_numpy(np.concatenate(ys)[:, None]),
            classes=None,
            owner=np.concatenate(owner),
            names=tuple(names),
            part=np.concatenate(parts),
        )
