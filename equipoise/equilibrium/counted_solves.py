"""A layer's solves: how many iterations they may take, their statistics, and warnings of those that failed."""

import warnings

import torch
from torch import Tensor, nn

from equipoise.equilibrium.fixed_point import Solution
from equipoise.equilibrium.options import Options
from equipoise.equilibrium.solve_stats import NotConverged, Solves, SolveStats
from equipoise.equilibrium.solve_warnings import described, user_stack_level

_LOST = 1e-3  # how far from its start a reversible iteration may end


class CountedSolves(nn.Module):
    """A layer that counts its solves, forward and backward, and warns of those that failed."""

    def __init__(self, options: Options, name: str):
        """Create the layer.

        Args:
            options: how it is solved.
            name: its name in warnings.
        """
        super().__init__()
        self.options = options
        self.name = name
        "name in warnings; for layers of a model, their place in it (see `layers`)"
        self.budget: int | None = None
        "iteration limit of a solve, forward and backward, on weak devices; unconverged solves are then not reported"
        self.last: Solution | None = None
        "result of the last solve, without z and f"
        self.last_backward: Solution | None = None
        "result of the last solve for a gradient, without z and f"
        self.solves = Solves()
        "statistics of all solves, for fixed points and for gradients"
        self.quiet = False
        "do not warn; the reader of the statistics reports problems"
        self._warned = {"forward": 0.0, "backward": 0.0}

    @property
    def tally(self) -> SolveStats:
        """Return the statistics of all forward solves."""
        return self.solves.forward

    @property
    def limit(self) -> int:
        """Return the iteration limit of a forward solve: that of the options, or the budget if it is smaller."""
        return self.limited(self.options.limit)

    def limited(self, limit: int) -> int:
        """Return a number of iterations, or the budget if it is smaller."""
        return limit if self.budget is None else min(limit, self.budget)

    def may_stop_unconverged(self, way: str) -> bool:
        """Tell whether unconverged solves, "forward" or "backward", may be intended: tol = 0, or a budget."""
        if way == "backward" and self.options.gradient == "reversible":
            return False
        return self.bounds(way)[0] == 0 or self.options.counted_tol is not None

    def complaints(self, solves: Solves) -> list[tuple[float, str]]:
        """Return the problems of these solves, each as the share of solves that failed and a sentence."""
        found = []
        for way, tally in (("forward", solves.forward), ("backward", solves.backward)):
            if tally.unexpected:
                found.append((tally.unexpected, self._complaint(tally, way)))
        return found

    def bounds(self, way: str) -> tuple[float, int]:
        """Return the tolerance and the iteration limit of a solve."""
        o = self.options
        if way == "forward":
            return o.tol, self.limited(o.limit)
        return (o.tol if o.backward_tol is None else o.backward_tol), self.limited(o.backward_limit or o.limit)

    def _complaint(self, stats: SolveStats, way: str) -> str:
        tol, limit = self.bounds(way)
        if way == "backward" and self.options.gradient == "reversible":
            return (
                f"the equilibrium layer {self.name} cannot undo its steps exactly in {stats.unconverged} of "
                f"{stats.solves} solves, and its gradient is wrong: going back ends up to {stats.residual:.2g} from "
                "the start, relative to the result. A smaller damping or limit helps"
            )
        return stats.complaint(described(self.name, way), self.options.counted_tol or tol, limit)

    def record(self, solution: Solution, way: str) -> Solution:
        """Count a solve, warn if it failed, and return it without its values."""
        own = self.options.limit if way == "forward" else self.options.backward_limit or self.options.limit
        budgeted = self.budget is not None and self.budget < own
        now = SolveStats.of(solution, self.bounds(way)[0], budgeted, self.options.counted_tol)
        self._count(now, way)
        nothing = solution.z.new_empty(0)
        return Solution(nothing, nothing, solution.iterations, solution.residual, solution.converged, solution.finite)

    def record_undone(self, steps: Tensor, lost: Tensor) -> None:
        """Count the backward pass of reversible iterations, and warn if it did not lead back to their start.

        Args:
            steps: number of steps of each sample.
            lost: how far from its start each sample ended, relative to the result.
        """
        wrong = int((~(lost <= _LOST)).sum())
        worst = float(lost.nan_to_num(1e300).max().clamp(max=1e300)) if len(lost) else 0.0
        self._count(SolveStats(len(steps), 2 * int(steps.sum()), wrong, residual=worst), "backward")

    def _count(self, now: SolveStats, way: str) -> None:
        getattr(self.solves, way).add(now)
        badness = torch.inf if now.diverged else now.residual
        # Warn once, and again only when it has become much worse.
        if now.unexpected and not self.quiet and badness > 10 * self._warned[way]:
            self._warned[way] = badness
            warnings.warn(self._complaint(now, way), NotConverged, stacklevel=user_stack_level())
