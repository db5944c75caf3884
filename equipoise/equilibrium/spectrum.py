"""The spectral radius of the Jacobian J = ∂f/∂z, which decides how fast iterations converge near a fixed point.

Plain iterations z ← f(z) converge there if it is below one. It is found by power iterations with Jᵀ, which has the same
eigenvalues and needs backward passes only. The largest eigenvalues may be two of equal size (a complex pair, or λ and
-λ), between which power iterations never decide. So the last two vectors together give the result: J is projected onto
the plane of v and Jᵀv, and the eigenvalues of that matrix of two by two are the estimates (Rayleigh-Ritz).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.equilibrium.regularisation import random_like, with_derivatives
from equipoise.equilibrium.states import State
from equipoise.errors import EquipoiseError


def spectral_radius(
    f: Callable[..., State],
    z: State,
    *inputs: Any,
    iterations: int = 20,
    probes: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Estimate the spectral radius of J = ∂f/∂z, one number per sample.

    Args:
        f: a function of (z, *inputs) that does not mix samples.
        z: where the Jacobian is taken, one row per sample: a tensor, or a tuple, list or dictionary of tensors; a fixed
            point, as a rule.
        inputs: further arguments of f.
        iterations: number of power iterations, each of which is one backward pass through f.
        probes: number of random vectors to start from; the largest result counts.
        generator: source of random numbers; by default torch's global one.
    """
    for name, value in (("iterations", iterations), ("probes", probes)):
        if not isinstance(value, int) or value < 1:
            raise EquipoiseError(f"{name} = {value!r} is not allowed; it must be a whole number >= 1")
    f, z = with_derivatives(f, z, "spectral_radius")
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        f_z = f(z, *(x.detach() if isinstance(x, Tensor) else x for x in inputs))
    if not f_z.requires_grad:
        nothing: Tensor = z.new_zeros(len(z))
        return nothing

    def product(rows: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(f_z, z, rows.view_as(z), retain_graph=True, materialize_grads=True)
        return found.reshape(len(z), z.shape[1:].numel())

    with torch.no_grad():
        found = [_largest(product, _unit(_start(z, generator))[0], iterations) for _ in range(probes)]
        return torch.stack(found).amax(0)


def _start(z: Tensor, generator: torch.Generator | None) -> Tensor:
    return random_like(z.detach().contiguous(), "gaussian", generator).reshape(len(z), z.shape[1:].numel())


def _largest(product: Callable[[Tensor], Tensor], v: Tensor, iterations: int) -> Tensor:
    for _ in range(iterations):
        v, _ = _unit(product(v))
    w = product(v)
    along = (v * w).sum(1)
    across, length = _unit(w - along[:, None] * v)
    # Where v is an eigenvector, what is left is rounding. Zeros in the second column then give an eigenvalue zero.
    across = across * (length > torch.finfo(v.dtype).eps ** 0.5 * torch.linalg.vector_norm(w, dim=1))[:, None]
    u = product(across)
    matrix = torch.stack([along, (v * u).sum(1), length, (across * u).sum(1)], dim=1).view(-1, 2, 2)
    finite = matrix.isfinite().all(-1).all(-1)
    matrix = torch.where(finite[:, None, None], matrix, 0)
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))  # eigenvalues need at least this precision
    return torch.where(finite, torch.linalg.eigvals(matrix).abs().amax(1).to(v.dtype), torch.nan)


def _unit(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with length one, or zero if they were zero, and their lengths."""
    length = torch.linalg.vector_norm(rows, dim=1)
    return rows / length.clamp(min=torch.finfo(rows.dtype).tiny)[:, None], length
