"""The size of the Jacobian J = ∂f/∂z, as a loss that keeps equilibria easy to solve (Bai et al., 2021).

‖J‖_F² is estimated without forming J: E ‖vᵀJ‖² = ‖J‖_F² for any v with E vvᵀ = I (Hutchinson), and vᵀJ is one backward
pass through f. The estimate can be differentiated, because that pass is recorded as well.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.equilibrium.options import Options
from equipoise.equilibrium.states import State, StateLayout
from equipoise.errors import EquipoiseError

Probes = Literal["rademacher", "gaussian"]


def jacobian_norm(
    f: Callable[..., State],
    z: State,
    *inputs: Any,
    probes: int = 1,
    distribution: Probes = "rademacher",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return an unbiased estimate of ‖J‖_F² / d with J = ∂f/∂z, as a mean over the samples of a batch.

    d is the number of entries of a sample's z. The estimate is a differentiable function of the parameters of f and of
    the inputs; z is a constant.

    Args:
        f: a function of (z, *inputs) that does not mix samples.
        z: where the Jacobian is taken, one row per sample: a tensor, or a tuple, list or dictionary of tensors.
        inputs: further arguments of f.
        probes: number of random vectors, each of which costs one backward pass through f.
        distribution: "rademacher" (entries ±1), which has the smaller variance, or "gaussian".
        generator: source of random numbers; by default torch's global one.
    """
    if not isinstance(probes, int) or probes < 1:
        raise EquipoiseError(f"probes = {probes!r} is not allowed; it must be a whole number >= 1")
    if distribution not in ("rademacher", "gaussian"):
        raise EquipoiseError(f"distribution = {distribution!r} is not allowed; it must be 'rademacher' or 'gaussian'")
    f, z = with_derivatives(f, z, "jacobian_norm")
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        value = f(z, *inputs)
        total = z.new_zeros(())
        for _ in range(probes if value.requires_grad else 0):
            v = random_like(z, distribution, generator)
            (product,) = torch.autograd.grad(
                value, z, v, create_graph=recorded, retain_graph=True, materialize_grads=True
            )
            total = total + product.square().sum()
    mean: Tensor = total / max(1, probes * z.numel())
    return mean


def with_derivatives(f: Callable[..., State], z: State, name: str) -> tuple[Callable[..., Tensor], Tensor]:
    """Return f and z for backward passes through f; a state of several tensors as rows of numbers.

    Args:
        f: the function.
        z: where its Jacobian is taken.
        name: the function that needs it, for errors.
    """
    if torch.is_inference_mode_enabled():
        raise EquipoiseError(f"{name} needs backward passes, which inference mode does not have; use torch.no_grad()")
    if isinstance(z, Tensor):
        return f, z
    layout = StateLayout(z)
    return layout.of_rows(f), layout.rows(z, "z")


def random_like(z: Tensor, distribution: Probes, generator: torch.Generator | None) -> Tensor:
    """Return a tensor of the shape of z with independent entries of mean 0 and variance 1.

    Args:
        z: the tensor.
        distribution: how entries are distributed.
        generator: source of random numbers; by default torch's global one.
    """
    v = torch.empty_like(z, device=z.device if generator is None else generator.device, requires_grad=False)
    if distribution == "gaussian":
        return v.normal_(generator=generator).to(z.device)
    return v.bernoulli_(0.5, generator=generator).mul_(2).sub_(1).to(z.device)


def draw_step(options: Options, limit: int, generator: torch.Generator | None) -> tuple[int, ...] | None:
    """Draw whether a training step has the auxiliary loss, and the iteration at whose guess J is taken.

    Args:
        options: the settings of the layer.
        limit: largest number of iterations of the solve.
        generator: source of random numbers; by default torch's global one.

    Returns:
        None without a loss; the number of an iteration; nothing if J is taken at the fixed point.
    """

    def uniform() -> float:
        return float(torch.rand((), generator=generator, device=None if generator is None else generator.device))

    if options.jacobian_probability < 1 and uniform() >= options.jacobian_probability:
        return None
    return (int(uniform() * limit),) if options.jacobian_at == "random-step" else ()
