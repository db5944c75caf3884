"""Polynomials that share some coefficients: regression where it is known what clients have in common."""

from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.polynomial.legendre import legvander

from equipoise import randomness
from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest, Source
from equipoise.data.text_encoding import numbered
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, NonNegative

BASE = np.array([0.0, -6.0, 18.0, -12.0])
"""The coefficients of 1, x, x^2 and x^3, which clients share or deviate from."""


class Polynomial(Source):
    """Noisy values of one cubic polynomial per client, with shared lower coefficients; inputs are powers of x.

    The powers are nearly parallel, so gradient steps on their coefficients are slow. With basis = "legendre" the inputs
    are orthonormal polynomials of the same degrees: the same functions and the same least squares, but no coefficient
    is shared any more. Coefficient k of that basis mixes those of x^k and all higher powers (the change of basis is
    triangular), and the highest one differs in all settings. So an oracle that knows what is shared, and areas under
    the ROC curve, belong to the powers.
    """

    paper: ClassVar[str] = "Learn2pFed, Section IV-B: Settings 1, 2 and 3"
    draws: ClassVar[bool] = True

    setting: Literal[1, 2, 3] = 1
    "shared coefficients; 1: those of 1, x and x^2; 2: those of 1 and x; 3: that of 1"
    layout: Literal["alike", "segments"] = "alike"
    "distribution of x; alike: uniform on 0..1 for all; segments: sorted and cut into one interval per client"
    basis: Literal["monomials", "legendre"] = "monomials"
    "inputs made of x; monomials: 1, x, x^2, x^3; legendre: Legendre polynomials, orthonormal for x uniform on 0..1"
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
        """Return the number of coefficients of powers of x that all clients share, whatever the basis."""
        return 4 - self.setting

    @property
    def shared_inputs(self) -> tuple[int, ...]:
        return tuple(range(self.shared)) if self.basis == "monomials" else ()

    def coefficients(self, clients: int, seed: int) -> np.ndarray:
        """Return the coefficients a_i of the powers of x, one row per client, whatever the basis."""
        a = np.tile(BASE, (clients, 1))
        rng = randomness.generator(seed, "polynomial coefficients")
        a[:, self.shared :] += rng.uniform(-10, 10, (clients, 4 - self.shared))
        return a

    def _inputs(self, x: np.ndarray) -> np.ndarray:
        """Return the polynomials of the basis at x, one column each."""
        if self.basis == "monomials":
            return _powers(x)
        return legvander(2 * x - 1, 3) * np.sqrt(2 * np.arange(4) + 1)

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
                noise = self.noise * rng.normal(size=len(x)) if part < 2 else 0.0
                xs.append(self._inputs(x))
                ys.append(_powers(x) @ a_i + noise)
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


def _powers(x: np.ndarray) -> np.ndarray:
    powers: np.ndarray = x[:, None] ** np.arange(4)
    return powers
