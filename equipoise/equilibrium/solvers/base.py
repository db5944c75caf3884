"""The interface of solvers: rules that make the next guess from the last ones, for all samples of a batch at once."""

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from equipoise.settings import Settings


class Progress(ABC):
    """A solver at work on one batch; samples are rows of shape (d,), and rows do not influence each other."""

    @abstractmethod
    def next(self, z: Tensor, f: Tensor, r: Tensor, noise: np.ndarray) -> Tensor:
        """Return the next guess. A row with NaN may return NaN (the caller drops that sample), but no other row may.

        Args:
            z: the last guess, of shape (batch, d).
            f: f(z).
            r: the residual f - z.
            noise: the norm of the difference of two residuals that rounding alone can cause, one number per sample.
        """


class Solver(Settings, ABC):
    """Settings of a solver; `begin` starts it on a batch."""

    @abstractmethod
    def begin(self, z: Tensor) -> Progress:
        """Start on a batch of guesses, of the shape (batch, d) of z."""


def to_numpy(t: Tensor) -> np.ndarray:
    """Return a tensor from any device as a float64 array; on a CPU, numpy is faster than torch with few numbers."""
    array: np.ndarray = t.cpu().double().numpy()
    return array
