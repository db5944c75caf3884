"""Noise of the server that is correlated over rounds, so that much of it cancels in what the model sums up.

A round's noise is n_t = sigma (C^-1 z)_t with independent standard normal z_t, where C is a lower triangular Toeplitz
matrix. What is released is then a function of C x + sigma z for the sums x_t of the rounds (matrix factorisation,
Denisov et al., 2022), which hides a client as one Gaussian mechanism does, with the sensitivity of C x. The server's
model is the sum of all rounds, whose noise A C^-1 z, with A the matrix of ones, is least for C = A^(1/2); its first
coefficients are used, as many as there are bands (Kalinin and Lampert, Banded Square Root Matrix Factorization, 2024).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from equipoise.privacy.accounting import ReleaseCount
from equipoise.state import State

Participation = frozenset[int]
"""The rounds, from 0, in which a client takes part."""


def square_root(bands: int) -> tuple[float, ...]:
    """Return the first coefficients of A^(1/2), which are binom(2k, k) / 4^k."""
    found = [1.0]
    for k in range(1, bands):
        found.append(found[-1] * (2 * k - 1) / (2 * k))
    return tuple(found)


def inverse(c: Sequence[float], length: int) -> np.ndarray:
    """Return the coefficients of the inverse of a Toeplitz matrix, for so many rounds."""
    found = np.zeros(length)
    tail = np.asarray(c[1:])
    for t in range(length):
        before = found[max(0, t - len(tail)) : t][::-1]
        found[t] = ((t == 0) - before @ tail[: len(before)]) / c[0]
    return found


def sensitivity(c: Sequence[float], taking_part: Iterable[Participation], rounds: int) -> float:
    """Return the largest length of C x over the participations, if a client adds at most 1 in each of its rounds.

    C has no negative entries, so the worst are additions in one direction: the length of the sum of C's columns.

    Args:
        c: the coefficients of C.
        taking_part: the rounds of each client.
        rounds: the number of rounds that are released.
    """
    most = 0.0
    for one in set(taking_part):
        column = np.zeros(rounds)
        for t in one:
            if t < rounds:
                end = min(rounds, t + len(c))
                column[t:end] += c[: end - t]
        most = max(most, float(column @ column))
    return sqrt(most)


def error_of_sums(c: Sequence[float], taking_part: Iterable[Participation], rounds: int) -> float:
    """Return the mean squared noise, relative to sigma, of the sums of the first 1, 2, ... rounds, at equal privacy."""
    sums = np.cumsum(inverse(c, rounds))
    squares = float(((rounds - np.arange(rounds)) * sums**2).sum()) / rounds
    return squares * sensitivity(c, taking_part, rounds) ** 2


def best_bands(taking_part: Iterable[Participation], rounds: int, most: int = 64) -> int:
    """Return the number of bands with the least error of sums: 1 if every client takes part in every round."""
    patterns = set(taking_part)
    tried: list[int] = sorted({*range(1, min(16, rounds) + 1), *range(20, min(most, rounds) + 1, 4)})
    errors = [error_of_sums(square_root(b), patterns, rounds) for b in tried]
    return tried[int(np.argmin(errors))]  # the first, if several are equal


@dataclass(frozen=True)
class CorrelatedReleases:
    """The releases of a run with correlated noise, given in which rounds each client takes part."""

    c: tuple[float, ...]
    taking_part: frozenset[Participation]
    rounds: int
    "number of rounds that are released"
    exchanges: int = 1

    @property
    def sensitivity(self) -> float:
        """Return the largest length of what one client adds to C x, if it adds at most 1 in a round."""
        return sensitivity(self.c, self.taking_part, self.rounds)

    def epsilon(self, z: float, delta: float) -> float:
        """Return the epsilon of all rounds together, with noise multiplier z."""
        found = self.sensitivity
        return ReleaseCount(1).epsilon(z / found, delta) if found else 0.0

    def noise(self, epsilon: float, delta: float) -> float:
        """Return the noise multiplier z for which all rounds together have this epsilon."""
        return ReleaseCount(1).noise(epsilon, delta) * self.sensitivity


def next_noise(c: Sequence[float], fresh: State, past: Sequence[Mapping[str, object]]) -> State:
    """Return a round's noise from independent noise: C n = z, solved by its last row.

    Args:
        c: the coefficients of C.
        fresh: independent noise z_t.
        past: the noise of the rounds before, the last one first; as many as there are bands, less one.
    """
    found = State(fresh)
    for weight, before in zip(c[1:], past, strict=False):
        found = State({k: t - weight * before[k] for k, t in found.items()})  # type: ignore[operator]
    return found if c[0] == 1 else State({k: t / c[0] for k, t in found.items()})
