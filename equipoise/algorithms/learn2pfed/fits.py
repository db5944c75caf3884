"""What a cell fits a client's heads to, by squared errors or by the task's loss, and what judges them."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from equipoise.algorithms._ridge import Spectrum
from equipoise.representations.head_problem import HeadProblem, largest_eigenvalue
from equipoise.torch_device import widened


class HeadFit(Protocol):
    """F in the update of v: a function of a client's heads, each a matrix."""

    def stepped(self, rho: Tensor, q: Tensor, v: Tensor, rate: float, steps: int) -> Tensor:
        """Take gradient steps on F(v) + rho/2 |v - q|² from v (Eq. 14).

        Args:
            rho: the strength of the pull, which is differentiated like everything else.
            q: where it pulls to.
            v: the heads to begin with.
            rate: the learning rate, in units of one over the smoothness.
            steps: number of steps.
        """


@runtime_checkable
class ClosedFit(HeadFit, Protocol):
    """An F whose minimum with the pull has a closed form."""

    def solved(self, rho: Tensor, q: Tensor) -> Tensor:
        """Minimise F(v) + rho/2 |v - q|² (Eq. 10)."""


class Judge(Protocol):
    """The loss by which the learnables are judged, as a function of a client's heads."""

    def value(self, v: Tensor) -> Tensor:
        """Return the loss of all heads together, up to a constant of the client's."""

    def gradient(self, v: Tensor) -> Tensor:
        """Return its gradient."""


class Fit(NamedTuple):
    """½|Xv - Y|² of a client's data, with X'X = U diag(d) U' factorised once for all cells, and U'X'Y."""

    U: Tensor
    d: Tensor
    UXY: Tensor

    @classmethod
    def of(cls, xx: Tensor, xy: Tensor) -> "Fit":
        """Factorise X'X; a client whose numbers are not finite gets NaN, so that the failure is seen."""
        U, d = Spectrum.of(xx)
        return cls(*(t.to(xx.dtype) for t in (U, d, U.mT @ widened(xy))))

    def solved(self, rho: Tensor, q: Tensor) -> Tensor:
        """Minimise ½|Xv - Y|² + rho/2 |v - q|²: (X'X + rho I)⁻¹ (rho q + X'Y)."""
        return self.U @ ((rho * (self.U.mT @ q) + self.UXY) / (self.d + rho))

    def stepped(self, rho: Tensor, q: Tensor, v: Tensor, rate: float, steps: int) -> Tensor:
        """Take gradient steps on the same from v, at a rate in units of one over its smoothness."""
        y, q = self.U.mT @ v, self.U.mT @ q
        step = rate / (self.d.amax(-2, keepdim=True) + rho)
        for _ in range(steps):
            y = y - step * (self.d * y - self.UXY + rho * (y - q))
        return self.U @ y


class UnfactoredFit(NamedTuple):
    """The same as `Fit`, as a function of X'X that can be differentiated, also where eigenvalues are equal."""

    xx: Tensor
    xy: Tensor

    def solved(self, rho: Tensor, q: Tensor) -> Tensor:
        """Minimise ½|Xv - Y|² + rho/2 |v - q|²."""
        eye = torch.eye(self.xx.shape[-1], dtype=self.xx.dtype, device=self.xx.device)
        found: Tensor = torch.linalg.solve(self.xx + rho * eye, rho * q + self.xy)
        return found

    def stepped(self, rho: Tensor, q: Tensor, v: Tensor, rate: float, steps: int) -> Tensor:
        """Take gradient steps on the same from v."""
        step = rate / (largest_eigenvalue(self.xx) + rho)
        for _ in range(steps):
            v = v - step * (self.xx @ v - self.xy + rho * (v - q))
        return v


class SquaresJudge(NamedTuple):
    """|Xv - Y|² / n, but for a constant, from X'X / n and X'Y / n."""

    xx: Tensor
    xy: Tensor

    def value(self, v: Tensor) -> Tensor:
        return (v * (self.xx @ v - 2 * self.xy)).flatten(-3).sum(-1)

    def gradient(self, v: Tensor) -> Tensor:
        return 2 * (self.xx @ v - self.xy)


class LossFit(NamedTuple):
    """The task's mean loss over the samples that each head is fitted to."""

    problem: HeadProblem
    weights: Tensor
    smoothness: Tensor

    @classmethod
    def of(cls, problem: HeadProblem, weights: Tensor) -> "LossFit":
        """Return the fit with these weights of the samples."""
        return cls(problem, weights, problem.smoothness(weights))

    def stepped(self, rho: Tensor, q: Tensor, v: Tensor, rate: float, steps: int) -> Tensor:
        """Take gradient steps on F(v) + rho/2 |v - q|² from v."""
        step = rate / (self.smoothness + rho)
        for _ in range(steps):
            v = v - step * (self.problem.gradient(v, self.weights) + rho * (v - q))
        return v


class LossJudge(NamedTuple):
    """The task's mean loss over the samples on which each head is judged."""

    problem: HeadProblem
    weights: Tensor

    def value(self, v: Tensor) -> Tensor:
        return self.problem.losses(v, self.weights).sum(-1)

    def gradient(self, v: Tensor) -> Tensor:
        return self.problem.gradient(v, self.weights)
