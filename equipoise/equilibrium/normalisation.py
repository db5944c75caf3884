"""Normalised weights for f: weight normalisation, and spectral normalisation by power iterations.

Both are parametrisations of torch: a layer's `weight` is computed from its parameters wherever it is read. An
equilibrium layer computes it once per forward pass and not in every iteration (`computed_once`).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input
from torch.nn.utils import parametrize

from equipoise.equilibrium.pure_call import inside_transform
from equipoise.equilibrium.solve_warnings import user_stack_level
from equipoise.errors import EquipoiseError

_Module = TypeVar("_Module", bound=nn.Module)


def weight_norm(f: _Module) -> _Module:
    """Give every nn.Linear and nn.Conv2d in f the weight g v / ‖v‖, row by row; g and v are its parameters.

    A warning names other matrices and kernels in f, which stay as they are. The layers compute the same as
    before. f is changed in place and returned (Salimans and Kingma, 2016).
    """
    for layer in _layers(f):
        parametrize.register_parametrization(layer, "weight", WeightNorm())
    return f


def spectral_norm(f: _Module, kappa: float = 0.95, iterations: int = 10, size: int = 16) -> _Module:
    """Scale the weight of every nn.Linear and nn.Conv2d in f down to a spectral norm of kappa, if it is larger.

    A warning names other matrices and kernels in f, which stay as they are.

    The norm is estimated by power iterations, from below; they always begin at the same vector, so nothing but the
    parameters has to be kept or sent. A convolution's norm is that of the map of images that it is, and not that of its
    kernel as a matrix. f is changed in place and returned.

    Args:
        f: a module.
        kappa: the bound.
        iterations: number of power iterations in each forward pass.
        size: height and width of the image that a convolution is tried on; on larger ones the norm is hardly larger.
    """
    if not isinstance(kappa, (int, float)) or not kappa > 0:
        raise EquipoiseError(f"kappa = {kappa!r} is not allowed; it must be a number > 0")
    for name, value in (("iterations", iterations), ("size", size)):
        if not isinstance(value, int) or value < 1:
            raise EquipoiseError(f"{name} = {value!r} is not allowed; it must be a whole number >= 1")
    for layer in _layers(f):
        parametrize.register_parametrization(layer, "weight", SpectralNorm(layer, kappa, iterations, size))
    return f


def _layers(f: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """Return the linear layers and convolutions, none of which may be normalised or projected already."""
    found = [layer for layer in f.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    if not found:
        raise EquipoiseError("f has no linear layers and no convolutions whose weights could be normalised")
    for layer in found:
        if parametrize.is_parametrized(layer, "weight") or callable(getattr(layer, "project_", None)):
            raise EquipoiseError(
                f"the weights of a {type(layer).__name__} in f are already normalised or projected; do one of the two"
            )
    _warn_of_others(f, found)
    return found


def _warn_of_others(f: nn.Module, normalised: list[nn.Linear | nn.Conv2d]) -> None:
    """Warn of matrices and kernels in f, such as those of transposed convolutions, that are not normalised."""
    known = {id(layer) for layer in normalised}
    others = [
        f"{place}.{name} ({type(layer).__name__})".removeprefix(".")
        for place, layer in f.named_modules()
        if id(layer) not in known and not isinstance(layer, (nn.LayerNorm, nn.RMSNorm, nn.Embedding))
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.ndim >= 2 and "bias" not in name
    ]
    if others:
        warnings.warn(
            f"only nn.Linear and nn.Conv2d are normalised; these weights in f stay as they are: {', '.join(others)}",
            stacklevel=user_stack_level(),
        )


class WeightNorm(nn.Module):
    """The parametrisation (g, v) ↦ g v / ‖v‖, row by row; torch's own has no derivatives in forward mode."""

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return v * (g / _row_norms(v).clamp(min=torch.finfo(v.dtype).tiny))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return g and v of a weight."""
        return _row_norms(weight), weight


def _row_norms(weight: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)
    return norms


class SpectralNorm(nn.Module):
    """The parametrisation W ↦ W min(1, κ / ‖W‖₂), with ‖W‖₂ estimated by power iterations."""

    start: Tensor

    def __init__(self, layer: nn.Linear | nn.Conv2d, kappa: float, iterations: int, size: int):
        """Create it for a layer; see `spectral_norm`."""
        super().__init__()
        self.kappa, self.iterations = kappa, iterations
        self.image: dict[str, Any] | None = None
        shape: tuple[int, ...] = (1, layer.weight.shape[1])
        if isinstance(layer, nn.Conv2d):
            if layer.padding_mode != "zeros" or isinstance(layer.padding, str) or layer.transposed:
                raise EquipoiseError("the spectral norm of a convolution needs padding with zeros, given as numbers")
            self.image = {n: getattr(layer, n) for n in ("stride", "padding", "dilation", "groups")}
            shape = (1, layer.in_channels, size, size)
        v = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.register_buffer("start", v.to(layer.weight), persistent=False)

    def extra_repr(self) -> str:
        return f"kappa={self.kappa:g}, iterations={self.iterations}"

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (self.kappa / self.norm(weight).clamp(min=self.kappa))

    def norm(self, weight: Tensor) -> Tensor:
        """Return the estimate of ‖W‖₂, a differentiable function of W."""
        if inside_transform():
            u, v = self._vectors(weight)
        else:  # the first derivative of the norm is uᵀ dW v, as if u and v did not move; without a record it is cheap
            with torch.no_grad():
                u, v = self._vectors(weight)
        norm: Tensor = (u * self._product(v, weight)).sum()
        return norm

    def _vectors(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return estimates of the first singular vectors, u and v."""
        v = self.start.to(weight.dtype)
        for _ in range(self.iterations):
            v = _unit(self._adjoint(_unit(self._product(v, weight)), weight))
        return _unit(self._product(v, weight)), v

    def _product(self, v: Tensor, weight: Tensor) -> Tensor:
        if self.image is None:
            return F.linear(v, weight)
        y: Tensor = F.conv2d(v, weight, **self.image)
        return y

    def _adjoint(self, u: Tensor, weight: Tensor) -> Tensor:
        """Return Wᵀu, without autograd, which inference mode and transforms of torch.func do not have."""
        if self.image is None:
            return u @ weight
        back: Tensor = conv2d_input(self.start.shape, weight, u, **self.image)
        return back


def _unit(x: Tensor) -> Tensor:
    unit: Tensor = x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(x.dtype).tiny)
    return unit


@contextmanager
def computed_once(f: object) -> Iterator[None]:
    """Compute the parametrised weights in f once, and use them in all calls within the context.

    They are computed with their gradients, so what is recorded within leads to the parameters as always. torch's own
    `parametrize.cached` is one cache for all threads of a process, and would keep weights that another thread still
    needs to change.

    Args:
        f: the function; without effect if it is not a module, and within transforms of torch.func.
    """
    # A weight that is computed within a transform of torch.func belongs to it, and solves are outside of it.
    modules = f.modules() if isinstance(f, nn.Module) and not inside_transform() else ()
    lists = [m for m in modules if isinstance(m, parametrize.ParametrizationList) and "forward" not in vars(m)]
    fixed = []
    try:
        for each in lists:
            _fix(each, each())
            fixed.append(each)
        yield
    finally:
        for each in fixed:
            del each.forward


def _fix(parametrised: nn.Module, weight: Tensor) -> None:
    computed_from = tuple(parametrised.parameters(recurse=False))

    def forward() -> Tensor:
        # `functional_call` within the context may replace the parameters; the weight is then another one.
        same = all(a is b for a, b in zip(computed_from, parametrised.parameters(recurse=False), strict=True))
        return weight if same else type(parametrised).forward(parametrised)

    parametrised.forward = forward
