"""What the solves of a layer came to, counted and put into words."""

from dataclasses import dataclass

from equipoise.equilibrium.solve import Solution


class NotConverged(UserWarning):
    """A solve ended at its limit, or f left the finite numbers."""


@dataclass
class Tally:
    """Sums over solves; a solve is one sample's."""

    solves: int = 0
    iterations: int = 0
    unconverged: int = 0
    "ended at the limit, though the layer was given no budget; those that diverged are among them"
    diverged: int = 0
    "met NaN or infinite numbers on the way"
    residual: float = 0.0
    "the largest with which a solve ended"

    def add(self, solution: Solution, budgeted: bool = False) -> None:
        self.solves += len(solution.iterations)
        self.iterations += int(solution.iterations.sum())
        diverged = ~solution.finite
        failed = diverged if budgeted else diverged | ~solution.converged
        self.diverged += int(diverged.sum())
        self.unconverged += int(failed.sum())
        if len(solution.residual):
            self.residual = max(self.residual, float(solution.residual.max()))

    def merge(self, other: "Tally") -> None:
        self.solves += other.solves
        self.iterations += other.iterations
        self.unconverged += other.unconverged
        self.diverged += other.diverged
        self.residual = max(self.residual, other.residual)

    @property
    def mean(self) -> float:
        """Iterations a solve."""
        return self.iterations / max(1, self.solves)

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def complaint(self, name: str, tol: float, limit: int) -> str | None:
        """What went wrong in the layer, and what may help; None if nothing did."""
        where = f"the equilibrium layer {name}"
        if self.diverged:
            return (
                f"{where} diverged: f(z) became NaN or infinite for {self.diverged} of {self.solves} samples; "
                "keep f a contraction (project its weights), or take smaller steps"
            )
        if self.unconverged:
            return (
                f"{where} did not converge for {self.unconverged} of {self.solves} samples: after {limit} iterations "
                f"the residual is up to {self.residual:.2g}, and should be {tol:g}; allow more iterations, or keep f "
                "a contraction (project its weights)"
            )
        return None


Solves = dict[str, Tally]
"""Of each equilibrium layer of a model, by its place."""
