"""What a solver is: a rule that makes the next guess from the last ones, for every sample of a batch at once."""

from abc import ABC, abstractmethod

from torch import Tensor

from equipoise.settings import Settings


class Progress(ABC):
    """A solver at work on one batch: z, f and r = f - z are (batch, d), a row a sample, and rows never mix."""

    @abstractmethod
    def next(self, z: Tensor, f: Tensor, r: Tensor) -> Tensor:
        """The next guess, a tensor of its own, from the guess z, f = f(z) and their difference.

        A row that has NaN may give NaN, and no other row may: that sample is taken out by the caller.
        """


class Solver(Settings, ABC):
    """Settings of a rule; `begin` starts it on a batch."""

    @abstractmethod
    def begin(self, z: Tensor) -> Progress:
        """For guesses of the shape (batch, d) of z."""
