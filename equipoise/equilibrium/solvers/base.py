"""What a solver is: a rule that makes the next guess from the last ones, for every sample of a batch at once."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from equipoise.settings import Settings


class Progress(ABC):
    """A solver at work on one batch: z, f and r = f - z are (batch, d), a row a sample, and rows never mix."""

    @abstractmethod
    def next(self, z: Tensor, f: Tensor, r: Tensor, noise: np.ndarray) -> Tensor:
        """The next guess from the guess z, f = f(z) and their difference.

        `noise` is how long a difference of two residuals may be by rounding alone, a number a sample. A row that has
        NaN may give NaN, and no other row may: that sample is taken out by the caller.
        """


class Solver(Settings, ABC):
    """Settings of a rule; `begin` starts it on a batch."""

    @abstractmethod
    def begin(self, z: Tensor) -> Progress:
        """For guesses of the shape (batch, d) of z."""


def to_numpy(t: Tensor) -> np.ndarray:
    """In double precision, whatever and wherever it is. On a CPU, numpy is quicker with a few numbers than torch is."""
    array: np.ndarray = (t.double() if t.device.type == "cpu" else t.to("cpu", torch.float64)).numpy()
    return array
