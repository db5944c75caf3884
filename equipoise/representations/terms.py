"""Terms of the objective that depend on representations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from equipoise.representations.points import HEAD
from equipoise.state import State


@dataclass(frozen=True, eq=False)
class LossTerm(ABC):
    """A term that is added to each sample's loss: a function of the model's representations at some points.

    With a stack of clients, the `probes` and all that is `given` have one more axis in front.
    """

    at: tuple[str, ...] = (HEAD,)
    "names of the representation points"
    probes: tuple[Tensor, ...] = ()
    "other, fixed vectors of parameters, whose representations of the same samples are needed as well"
    given: State = field(default_factory=State)
    "all other tensors that the term depends on"
    anchor: tuple[Tensor, Tensor] | None = None
    """a vector and a gradient there of the mean over all samples: gradients on a batch are then corrected by their
    error at that vector, which keeps their expectation and reduces their variance nearby"""
    anchored: Literal["term", "objective"] = "term"
    "which gradient is corrected: that of the term, or that of the loss with the term"

    @staticmethod
    @abstractmethod
    def each(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, given: State) -> Tensor:
        """Return the term of each sample.

        Args:
            h: the model's representations at each point.
            probed: those of the probes, each at all points, one probe after the other.
            y: the targets.
            given: the other tensors.
        """


class BatchTerm(LossTerm):
    """A term of a batch as a whole, such as a distance between two distributions, which is added to the batch's loss.

    It has no gradients of single samples, so sample-level privacy cannot cover it.
    """

    @staticmethod
    @abstractmethod
    def whole(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, weights: Tensor, given: State) -> Tensor:
        """Return the term of a batch, a single number.

        Args:
            h: the model's representations at each point.
            probed: those of the probes, each at all points, one probe after the other.
            y: the targets.
            weights: the weight of each sample in a mean over the batch: one over their number, and zero for samples
                that only fill up a batch and must not count.
            given: the other tensors.
        """

    @staticmethod
    def each(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, given: State) -> Tensor:
        """Return zeros: nothing of the term belongs to a single sample."""
        return h[0].new_zeros(len(h[0]))
