"""The registry of solvers: one line per solver."""

from equipoise.equilibrium.solvers.anderson import Anderson
from equipoise.equilibrium.solvers.base import Progress, Solver, to_numpy
from equipoise.equilibrium.solvers.broyden import Broyden
from equipoise.equilibrium.solvers.plain import Plain

SOLVERS: dict[str, type[Solver]] = {"anderson": Anderson, "broyden": Broyden, "plain": Plain}

__all__ = ["SOLVERS", "Anderson", "Broyden", "Plain", "Progress", "Solver", "to_numpy"]
