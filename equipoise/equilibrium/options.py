"""Settings of an equilibrium layer, also used by models with such a layer."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from equipoise.equilibrium.solvers import SOLVERS, Solver
from equipoise.settings import Count, NonNegative, Settings


def _known(name: str) -> str:
    if name not in SOLVERS:
        raise ValueError(name)
    return name


SolverName = Annotated[str, AfterValidator(_known), WithJsonSchema({"enum": list(SOLVERS)})]

WarmStartKind = Literal["off", "update", "client"]
Gradient = Literal["implicit", "jacobian-free", "unroll"]


class Options(Settings):
    """Settings for solving and differentiating an equilibrium layer."""

    later: ClassVar[tuple[str, ...]] = (
        "jacobian_weight",
        "jacobian_probability",
        "jacobian_probes",
        "jacobian_at",
        "spectral_radius",
    )

    solver: SolverName = "anderson"
    "solver of the fixed point"
    window: Annotated[int, Field(ge=2, le=1000)] | None = None
    "number of guesses that anderson combines (5 by default), or of steps that broyden learns from (10)"
    ridge: Annotated[float, Field(ge=0, le=1)] = 1e-4
    "weight of the ridge in anderson's least-squares problems"
    mixing: Annotated[float, Field(gt=0, le=1)] = 1.0
    "step size of anderson or plain towards f(z)"
    tol: NonNegative = 1e-3
    "tolerance; a sample has converged when ‖f(z) - z‖ is at most this times ‖f(z)‖"
    limit: Count = 20
    "largest number of iterations of a solve"
    gradient: Gradient = "implicit"
    "implicit solves for the exact gradient, jacobian-free skips that solve, unroll records every iteration"
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

    def method(self, name: SolverName) -> Solver:
        """Return the solver of this name with these settings."""
        wanted = {"window": self.window, "ridge": self.ridge, "mixing": self.mixing}
        cls = SOLVERS[name]
        return cls(**{k: v for k, v in wanted.items() if k in cls.model_fields and v is not None})
