"""What the solves of a layer came to, counted and put into words."""

from dataclasses import dataclass, field

from equipoise.equilibrium.fixed_point import Solution


class NotConverged(UserWarning):
    """A solve ended at its limit, or met NaN or infinite numbers."""


@dataclass
class SolveStats:
    """Sums over solves; a solve is one sample's."""

    solves: int = 0
    iterations: int = 0
    unconverged: int = 0
    "ended at the limit, though the layer was given no budget; those that diverged are among them"
    diverged: int = 0
    "met NaN or infinite numbers on the way"
    residual: float = 0.0
    "the largest with which a solve ended"

    @staticmethod
    def of(solution: Solution, budgeted: bool = False) -> "SolveStats":
        diverged = ~solution.finite
        failed = diverged if budgeted else diverged | ~solution.converged
        return SolveStats(
            len(solution.iterations),
            int(solution.iterations.sum()),
            int(failed.sum()),
            int(diverged.sum()),
            float(solution.residual.max().clamp(max=1e300)) if len(solution.residual) else 0.0,
        )

    def add(self, other: "SolveStats") -> None:
        self.solves += other.solves
        self.iterations += other.iterations
        self.unconverged += other.unconverged
        self.diverged += other.diverged
        self.residual = max(self.residual, other.residual)

    @property
    def mean(self) -> float:
        """Iterations a solve."""
        return self.iterations / max(1, self.solves)

    @property
    def failed(self) -> float:
        """The part of the solves that did not converge."""
        return self.unconverged / max(1, self.solves)

    def complaint(self, what: str, tol: float, limit: int) -> str:
        """What went wrong, and what may help."""
        if self.diverged:
            more = self.unconverged - self.diverged
            found = f"{self.diverged} of {self.solves} solves met NaN or infinite numbers"
            found = f"{what} diverged: {found}" + (f", and {more} more did not converge" if more else "")
        else:
            found = (
                f"{what} did not converge in {self.unconverged} of {self.solves} solves: after {limit} iterations "
                f"the residual is up to {self.residual:.2g}, and should be {tol:g}"
            )
        return f"{found}. More iterations (limit), smaller steps (lr) or bounded weights (contraction) may help"


@dataclass
class Solves:
    """Those of one layer for its fixed points, and for their gradients."""

    forward: SolveStats = field(default_factory=SolveStats)
    backward: SolveStats = field(default_factory=SolveStats)

    def add(self, other: "Solves") -> None:
        self.forward.add(other.forward)
        self.backward.add(other.backward)
