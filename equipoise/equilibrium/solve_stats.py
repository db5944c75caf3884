"""Statistics of a layer's solves, and their description in words."""

from dataclasses import dataclass, field

from equipoise.equilibrium.fixed_point import Solution


class NotConverged(UserWarning):
    """Warns that a solve ended at its limit, or met NaN or infinite numbers."""


@dataclass
class SolveStats:
    """Sums over solves, where each sample is one solve."""

    solves: int = 0
    iterations: int = 0
    unconverged: int = 0
    "number of solves that diverged, or whose residual is above the tolerance (see `of` for layers with a budget)"
    diverged: int = 0
    "number of solves that met NaN or infinite numbers"
    residual: float = 0.0
    "largest final residual of a solve"
    intended: int = 0
    "number of unconverged solves that did what they were asked to: all iterations of a budget, or of tol = 0"
    measured: int = 0
    "number of samples at whose fixed point the spectral radius of the Jacobian was measured"
    radius: float = 0.0
    "sum of these radii"

    @staticmethod
    def of(solution: Solution, tol: float, budgeted: bool = False, counted: float | None = None) -> "SolveStats":
        """Return the statistics of one batch.

        Args:
            solution: the solves.
            tol: their tolerance.
            budgeted: whether a budget ended them; only solves that diverged then count as unconverged, unless a
                tolerance is given for the count.
            counted: the tolerance within which a solve counts as converged; by default that of the solves.
        """
        diverged = ~solution.finite
        if counted is not None:
            failed = diverged | ~(solution.residual <= counted)
        else:
            failed = diverged if budgeted else diverged | ~solution.converged
        meant = int((failed & ~diverged).sum()) if budgeted or tol == 0 else 0
        return SolveStats(
            len(solution.iterations),
            int(solution.iterations.sum()),
            int(failed.sum()),
            int(diverged.sum()),
            float(solution.residual.max().clamp(max=1e300)) if len(solution.residual) else 0.0,
            meant,
        )

    def add(self, other: "SolveStats") -> None:
        """Add the statistics of other solves."""
        self.solves += other.solves
        self.iterations += other.iterations
        self.unconverged += other.unconverged
        self.diverged += other.diverged
        self.residual = max(self.residual, other.residual)
        self.intended += other.intended
        self.measured += other.measured
        self.radius += other.radius

    @property
    def mean(self) -> float:
        """Return the mean number of iterations per solve."""
        return self.iterations / max(1, self.solves)

    @property
    def failed(self) -> float:
        """Return the share of solves that did not converge."""
        return self.unconverged / max(1, self.solves)

    @property
    def unexpected(self) -> float:
        """Return the share of solves that did not converge although they should have."""
        return (self.unconverged - self.intended) / max(1, self.solves)

    def complaint(self, what: str, tol: float, limit: int) -> str:
        """Return a sentence that says what went wrong, and what may help.

        Args:
            what: the name of the layer, as the subject of the sentence.
            tol: the tolerance within which they should have converged.
            limit: their iteration limit.
        """
        unexpected = self.unconverged - self.intended
        if self.diverged:
            more = unexpected - self.diverged
            found = f"{self.diverged} of {self.solves} solves met NaN or infinite numbers"
            found = f"{what} diverged: {found}" + (f", and {more} more did not converge" if more else "")
        else:
            found = (
                f"{what} did not converge in {unexpected} of {self.solves} solves: after {limit} iterations "
                f"the residual is up to {self.residual:.2g}, and should be {tol:g}"
            )
        return f"{found}. More iterations (limit), smaller steps (lr) or bounded weights (contraction) may help"


@dataclass
class Solves:
    """Statistics of a layer's solves for fixed points (forward) and for gradients (backward)."""

    forward: SolveStats = field(default_factory=SolveStats)
    backward: SolveStats = field(default_factory=SolveStats)

    def add(self, other: "Solves") -> None:
        """Add the statistics of other solves."""
        self.forward.add(other.forward)
        self.backward.add(other.backward)
