"""Majority vote of signs: only the direction of each coordinate counts, once per client."""

from typing import ClassVar, Literal

from torch import Tensor

from equipoise.reducers.base import ContextReducer
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.differences import Differences
from equipoise.reducers.order import median
from equipoise.settings import Positive
from equipoise.state import State, Uploads


class SignMajority(ContextReducer):
    """A step of fixed length in every coordinate, in the direction in which more clients go; a tie moves nothing."""

    paper: ClassVar[str] = "Bernstein et al., signSGD with Majority Vote, ICLR 2019"
    needs_origin: ClassVar[bool] = True

    step: Positive | Literal["median"] = 0.001
    "length of the step in a coordinate; or the median of the lengths of the clients' differences there"

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        def vote(d: Tensor) -> Tensor:
            length = median(d.abs()) if self.step == "median" else self.step
            return d.sign().sum(0).sign() * length

        return Differences(uploads, context.origin_for(uploads, self)).each(vote), context.memory
