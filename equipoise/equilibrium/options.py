"""How an equilibrium layer is solved and differentiated: the same settings for a layer and for a model with one."""

from typing import Annotated, Literal

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
    solver: SolverName = "anderson"
    "how the fixed point is found"
    window: Annotated[int, Field(ge=2, le=1000)] | None = None
    "guesses that anderson combines (5), steps that broyden learns from (10)"
    ridge: Annotated[float, Field(ge=0, le=1)] = 1e-4
    "weight of the ridge in anderson's least-squares problems"
    mixing: Annotated[float, Field(gt=0, le=1)] = 1.0
    "how far towards f(z) a step of anderson or plain goes"
    tol: NonNegative = 1e-3
    "a sample is done when ‖f(z) - z‖ is at most this times ‖f(z)‖"
    limit: Count = 20
    "most iterations of a solve"
    gradient: Gradient = "implicit"
    "implicit solves for the exact gradient, jacobian-free leaves the solve out; unroll remembers every iteration"
    backward_solver: SolverName | None = None
    "how the implicit gradient is found; as the fixed point where it is not given"
    backward_tol: NonNegative | None = None
    "tolerance of the implicit gradient's solve; tol where it is not given"
    backward_limit: Count | None = None
    "most iterations of the implicit gradient's solve; limit where it is not given"
    start: Literal["zero", "input"] = "zero"
    "the first guess"
    warm_start: WarmStartKind = "update"
    "begin at the sample's last fixed point: of this local update, or kept with the client's state between rounds"

    def method(self, name: SolverName) -> Solver:
        wanted = {"window": self.window, "ridge": self.ridge, "mixing": self.mixing}
        cls = SOLVERS[name]
        return cls(**{k: v for k, v in wanted.items() if k in cls.model_fields and v is not None})
