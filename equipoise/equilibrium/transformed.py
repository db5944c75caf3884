"""The result of an equilibrium layer within transforms of torch.func."""

from torch import Tensor

from equipoise.equilibrium.fixed_point import computed
from equipoise.equilibrium.functional import Problem, fixed_point, once_differentiable, with_derivatives
from equipoise.equilibrium.functional import Solver as Solved
from equipoise.equilibrium.implicit_gradient import Adjoint, damped_steps
from equipoise.equilibrium.options import Options
from equipoise.equilibrium.pure_call import PureCall, refusing_hidden_tensors


def unrolled(call: PureCall, z: Tensor, limit: int) -> Tensor:
    """Return the state after `limit` plain iterations.

    Args:
        call: f as a function of all its tensors.
        z: the first guess.
        limit: number of iterations.
    """
    for _ in range(limit):
        z = computed(call, z, *call.tensors)
    return z


def transformed(call: PureCall, start: Tensor, o: Options, steps: int, solved: Solved, series: Adjoint) -> Tensor:
    """Return f at the fixed point, with derivatives that transforms of torch.func can take.

    Args:
        call: f as a function of all its tensors.
        start: the first guess.
        o: how the layer is solved and differentiated.
        steps: number of steps of a phantom gradient.
        solved: solves forward and backward.
        series: sums the Neumann series of `gradient = "neumann"`.
    """
    tensors = call.tensors
    refusing_hidden_tensors(call, "within transforms of torch.func")(start, *tensors)
    problem = Problem(call, solved, series if o.gradient == "neumann" else None)
    z = fixed_point(problem, start, tensors)
    if o.gradient in ("implicit", "neumann"):
        value = with_derivatives(problem, z, tensors)
        return value if o.gradient == "implicit" else once_differentiable(value, tensors)
    value = moving = call(z, *tensors)
    if o.gradient == "phantom":
        moving = damped_steps(lambda z: call(z, *tensors), z, steps, o.damping)
        moving = moving + (value - moving).detach()
    return once_differentiable(moving, tensors)
