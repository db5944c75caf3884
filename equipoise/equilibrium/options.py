"""Settings of an equilibrium layer, also used by models with such a layer."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from equipoise.equilibrium.solvers import SOLVERS, Solver
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, NonNegative, Settings


def _known(name: str) -> str:
    if name not in SOLVERS:
        raise ValueError(name)
    return name


SolverName = Annotated[str, AfterValidator(_known), WithJsonSchema({"enum": list(SOLVERS)})]

WarmStartKind = Literal["off", "update", "client"]
Gradient = Literal["implicit", "jacobian-free", "phantom", "neumann", "reversible", "unroll"]


class Options(Settings):
    """Settings for solving and differentiating an equilibrium layer."""

    solver: SolverName = "anderson"
    "solver of the fixed point"
    window: Annotated[int, Field(ge=2, le=1000)] | None = None
    "number of guesses that anderson combines (5 by default), or of steps that broyden learns from (10)"
    ridge: Annotated[float, Field(ge=0, le=1)] = 1e-4
    "weight of the ridge in anderson's least-squares problems"
    mixing: Annotated[float, Field(gt=0, le=1)] = 1.0
    "step size of anderson or plain towards f(z)"
    tol: NonNegative = 1e-3
    "tolerance; a sample has converged when ‖f(z) - z‖ is at most this times ‖f(z)‖; 0: all iterations are performed"
    counted_tol: NonNegative | None = None
    "tolerance within which a solve, forward or backward, counts as converged in the statistics; by default tol"
    limit: Count = 20
    "largest number of iterations of a solve"
    gradient: Gradient = "implicit"
    "implicit and reversible are exact; phantom, neumann and jacobian-free approximate; unroll records every iteration"
    phantom_steps: Count = 5
    "number of damped steps of gradient = phantom or neumann"
    damping: Annotated[float, Field(gt=0, le=1)] = 0.5
    "size of those steps, and of the steps of reversible, towards f(z); 1 is not damped, and not allowed for reversible"
    backward_solver: SolverName | None = None
    "solver of the implicit gradient; by default the same as for the fixed point"
    backward_tol: NonNegative | None = None
    "tolerance of the implicit gradient's solve; by default tol"
    backward_limit: Count | None = None
    "largest number of iterations of the implicit gradient's solve; by default limit"
    start: Literal["zero", "input"] = "zero"
    "the first guess"
    warm_start: WarmStartKind = "update"
    "start at the sample's last fixed point: of this local update, or kept with the client's state between rounds"

    jacobian_weight: NonNegative = 0.0
    "weight of the auxiliary loss ‖J‖_F² / d with J = ∂f/∂z, estimated at random; 0 switches it off"
    jacobian_probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    "probability that a training step has the auxiliary loss"
    jacobian_probes: Count = 1
    "number of random vectors in an estimate of ‖J‖_F²"
    jacobian_at: Literal["fixed-point", "random-step"] = "fixed-point"
    "where J is taken: at the fixed point, or at the guess of a random iteration of the solve"
    spectral_radius: bool = False
    "report the spectral radius of ∂f/∂z, measured at the fixed points of the first batch of every local update"

    @model_validator(mode="after")
    def _counted_solves_can_converge(self) -> "Options":
        largest = max(self.tol, self.backward_tol or 0.0)
        if self.counted_tol is not None and self.counted_tol < largest:
            raise EquipoiseError(
                f"counted_tol = {self.counted_tol:g} is below the tolerance {largest:g} at which solves stop, so that "
                "converged solves would count as unconverged; give at least that, or a smaller tol"
            )
        return self

    def method(self, name: SolverName) -> Solver:
        """Return the solver of this name with these settings."""
        wanted = {"window": self.window, "ridge": self.ridge, "mixing": self.mixing}
        cls = SOLVERS[name]
        return cls(**{k: v for k, v in wanted.items() if k in cls.model_fields and v is not None})
