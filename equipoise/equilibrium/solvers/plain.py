"""Plain iteration: z becomes f(z), or moves part of the way there."""

from typing import Annotated

import numpy as np
from pydantic import Field
from torch import Tensor

from equipoise.equilibrium.solvers.base import Progress, Solver


class Plain(Solver):
    """Banach's iteration, which converges if f is a contraction."""

    mixing: Annotated[float, Field(gt=0, le=1)] = 1.0
    "step size towards f(z)"

    def begin(self, z: Tensor) -> Progress:
        return _Plain(self.mixing)


class _Plain(Progress):
    def __init__(self, mixing: float):
        self.mixing = mixing

    def next(self, z: Tensor, f: Tensor, r: Tensor, noise: np.ndarray) -> Tensor:
        return f if self.mixing == 1 else z + self.mixing * r
