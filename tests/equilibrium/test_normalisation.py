"""Normalised weights: the bounds they promise, computed once per pass, with gradients that reach the parameters."""

import warnings
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrize

from equipoise.equilibrium import (
    ContractiveConv2d,
    ContractiveLinear,
    Equilibrium,
    SpectralNorm,
    conv_norm_bound,
    spectral_norm,
    weight_norm,
)
from equipoise.equilibrium.options import Gradient
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace
from tests.support.fixed_points import EXACT, Dense, random


def dense_norm(layer: nn.Module, *shape: int) -> float:
    """The largest singular value of the layer without its bias, as a matrix."""
    x = torch.zeros(1, *shape, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(layer, x)
    return float(np.linalg.norm(jacobian.reshape(-1, x.numel()).numpy(), 2))


def counted(f: nn.Module) -> list[int]:
    calls = [0]
    for module in f.modules():
        if isinstance(module, parametrize.ParametrizationList):
            module[0].register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    return calls


def test_weight_norm_changes_the_parameters_and_not_the_function() -> None:
    f, x, z = Dense(), random(3, 5), random(3, 5, seed=2)
    before = f(z, x)
    normalised = weight_norm(f)
    torch.testing.assert_close(normalised(z, x), before)
    rows = f.b.weight.norm(dim=1)
    f.b.parametrizations.weight.original1.data *= 7  # type: ignore[union-attr, operator]
    torch.testing.assert_close(f.b.weight.norm(dim=1), rows)


def test_the_parameter_space_has_g_and_v_and_no_weight_and_spectral_norm_no_changing_buffers() -> None:
    def sizes(f: nn.Module) -> dict[str, int]:
        return {entry.name: entry.numel for entry in ParameterSpace(f).entries}

    weighted, spectral = weight_norm(Dense()), spectral_norm(Dense())
    assert sizes(weighted) == {
        "b.bias": 5,
        "b.parametrizations.weight.original0": 5,  # g, one per row
        "b.parametrizations.weight.original1": 25,  # v
    }
    assert sizes(spectral) == {"b.bias": 5, "b.parametrizations.weight.original": 25}
    before = {name: b.clone() for name, b in spectral.named_buffers()}
    Equilibrium(spectral)(random(2, 5)).sum().backward()
    assert all(torch.equal(b, before[name]) for name, b in spectral.named_buffers())


@pytest.mark.parametrize("kind", ["linear", "conv", "strided"])
def test_the_spectral_norm_is_that_of_the_dense_matrix(kind: str) -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(7, 4, bias=False)
    if kind != "linear":
        layer = nn.Conv2d(3, 5, 3, padding=1, bias=False, stride=2 if kind == "strided" else 1)
    layer = layer.double()
    shape = (7,) if kind == "linear" else (3, 6, 6)
    exact = dense_norm(layer, *shape)
    estimate = SpectralNorm(layer, 0.9, 300, 6).norm(layer.weight)
    assert float(estimate) == pytest.approx(exact, rel=2e-3)  # singular values of convolutions lie close together
    for few in (1, 3):
        assert float(SpectralNorm(layer, 0.9, few, 6).norm(layer.weight)) <= exact * (1 + 1e-12)
    layer.weight.data *= 5 / exact
    spectral_norm(layer, kappa=0.9, iterations=300, size=6)
    assert dense_norm(layer, *shape) == pytest.approx(0.9, rel=2e-3)


def test_weights_within_the_bound_stay_as_they_are() -> None:
    layer = nn.Linear(5, 5, bias=False).double()
    layer.weight.data *= 0.1 / dense_norm(layer, 5)
    before = layer.weight.detach().clone()
    torch.testing.assert_close(spectral_norm(layer, kappa=0.9).weight, before, rtol=1e-12, atol=0)


def test_for_convolutions_it_is_tighter_than_the_bound_for_all_sizes() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 6, 3, padding=1, bias=False).double()
    assert float(SpectralNorm(conv, 0.9, 100, 12).norm(conv.weight)) < 0.999 * float(conv_norm_bound(conv.weight))


def test_the_gradient_of_the_spectral_norm_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 1, (2, 1), bias=False).double()
    norm = SpectralNorm(conv, 0.5, 100, 2)
    assert torch.autograd.gradcheck(norm, (conv.weight.detach() * 5).requires_grad_(), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("normalise", [weight_norm, spectral_norm])
@pytest.mark.parametrize("gradient", ["implicit", "jacobian-free", "unroll"])
def test_weights_are_computed_once_per_pass_and_gradients_reach_the_parameters(normalise: Any, gradient: Any) -> None:
    f, x = normalise(Dense(scale=0.9)), random(3, 5)
    calls = counted(f)
    layer = Equilibrium(f, gradient=gradient, jacobian_weight=0.1, **{**EXACT, "limit": 100})
    out = layer(x)
    assert calls == [1]
    assert int(layer.last.iterations.min()) > 3  # type: ignore[union-attr]
    out.square().sum().backward()
    assert calls == [1]
    for name, p in f.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 0, name
    with torch.no_grad():
        layer(x)
    assert calls == [2]


@pytest.mark.parametrize("normalise", [weight_norm, spectral_norm])
def test_the_gradient_is_that_of_unrolled_iterations(normalise: Any) -> None:
    found = []
    for gradient, limit in (("implicit", 500), ("unroll", 200)):
        f = normalise(Dense(scale=0.8))
        Equilibrium(f, gradient=gradient, tol=1e-13, limit=limit, solver="plain")(
            random(3, 5)
        ).square().sum().backward()
        found.append([p.grad for p in f.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("normalise", [weight_norm, spectral_norm])
@pytest.mark.parametrize("gradient", get_args(Gradient))
def test_every_gradient_mode_works_in_training_and_in_inference_mode(normalise: Any, gradient: Any) -> None:
    """Each mode comes near the implicit gradient with many steps, and inference gives the result of training."""
    x, found = random(3, 5), []
    for mode in ("implicit", gradient):
        f = normalise(Dense(scale=0.7))
        layer = Equilibrium(f, gradient=mode, tol=1e-12, limit=80, phantom_steps=80, damping=0.5, solver="plain")
        layer.quiet = True
        out = layer(x)
        out.square().sum().backward()
        found.append([p.grad for p in f.parameters()])
        with torch.inference_mode():
            torch.testing.assert_close(layer(x), out.detach())
    for ours, exact in zip(*found, strict=True):
        cosine = torch.cosine_similarity(ours.flatten(), exact.flatten(), dim=0)  # type: ignore[union-attr]
        assert float(cosine) > (0.5 if gradient == "jacobian-free" else 1 - 1e-6)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)
        nn.init.normal_(self.b.weight, std=0.3, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.b.bias)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.b(z) + x)


@pytest.mark.parametrize(("kind", "images"), [("weight", False), ("spectral", False), ("spectral", True)])
def test_normalised_weights_have_all_derivatives_of_torch_func(kind: str, images: bool) -> None:
    f: nn.Module = Images() if images else Dense(3, scale=0.7)
    f = weight_norm(f) if kind == "weight" else spectral_norm(f, kappa=0.3, iterations=4, size=3)
    layer = Equilibrium(f, tol=1e-9, limit=100)
    x = random(2, *((2, 3, 3) if images else (3,)))
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    (name,) = (n for n in parameters if n.endswith(("original", "original1")))
    w, direction = parameters[name], random(*parameters[name].shape, seed=5)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        out: Tensor = functional_call(layer, {**parameters, name: w}, (x,)).square().sum()
        return out

    h = 1e-4
    gradient = grad(loss)(w, x)
    slope = jvp(lambda w: loss(w, x), (w,), (direction,))[1]
    torch.testing.assert_close(slope, (gradient * direction).sum(), rtol=1e-5, atol=1e-7)
    rise = (loss(w + h * direction, x) - loss(w - h * direction, x)) / (2 * h)
    torch.testing.assert_close(slope, rise, rtol=1e-4, atol=1e-5)
    bent = (grad(loss)(w + h * direction, x) - grad(loss)(w - h * direction, x)) / (2 * h)
    torch.testing.assert_close(jvp(lambda w: grad(loss)(w, x), (w,), (direction,))[1], bent, rtol=1e-4, atol=1e-4)
    bent = (grad(loss, 1)(w, x + h) - grad(loss, 1)(w, x - h)) / (2 * h)
    ones = torch.ones_like(x)
    torch.testing.assert_close(jvp(lambda x: grad(loss, 1)(w, x), (x,), (ones,))[1], bent, rtol=1e-4, atol=1e-4)
    both = vmap(loss, (0, None))(torch.stack([w, 2 * w]), x)
    torch.testing.assert_close(both, torch.stack([loss(w, x), loss(2 * w, x)]))


def test_weights_of_a_row_of_zeros_stay_zeros() -> None:
    layer = nn.Linear(3, 2)
    nn.init.zeros_(layer.weight)
    weight_norm(layer)(torch.ones(1, 3)).sum().backward()
    assert layer.weight.abs().max() == 0
    assert all(p.grad.isfinite().all() for p in layer.parameters())  # type: ignore[union-attr]


def test_an_error_in_one_normalisation_leaves_the_others_as_they_were() -> None:
    f = weight_norm(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    f[1].parametrizations.weight[0].register_forward_pre_hook(_fail)
    with pytest.raises(ValueError, match="broken"):
        Equilibrium(nn.ModuleList([f]))(torch.zeros(2, 3))
    before = f[0].weight.detach().clone()
    f[0].parametrizations.weight.original0.data *= 2
    torch.testing.assert_close(f[0].weight.detach(), 2 * before)
    assert all("forward" not in vars(layer.parametrizations.weight) for layer in f)


def _fail(*_: object) -> None:
    raise ValueError("broken")


def test_weights_follow_a_step_of_training_and_errors_leave_nothing_behind() -> None:
    f, x = weight_norm(Dense()), random(3, 5)
    layer = Equilibrium(f, **EXACT)
    before = layer(x).detach()
    f.b.parametrizations.weight.original0.data *= 2  # type: ignore[union-attr, operator]
    assert not torch.allclose(layer(x), before)
    with pytest.raises(RuntimeError):
        layer(random(3, 4))
    weight = f.b.weight.detach().clone()
    f.b.parametrizations.weight.original0.data *= 2  # type: ignore[union-attr, operator]
    torch.testing.assert_close(f.b.weight.detach(), 2 * weight)


def test_parameters_that_functional_call_replaces_are_used() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = weight_norm(Dense())

        def forward(self, z: Tensor, x: Tensor, g: Tensor) -> Tensor:
            given = {"b.parametrizations.weight.original0": g[:5, None]}
            out: Tensor = functional_call(self.f, given, (z, x))
            return out

    x, g = random(5, 5), torch.zeros(5, dtype=torch.float64)
    outer = Outer()
    out = Equilibrium(outer, **EXACT)(x, g)  # without B, f is tanh(b + x)
    torch.testing.assert_close(out, torch.tanh(outer.f.b.bias + x))


def test_a_contraction_by_spectral_norm_converges_whatever_the_weights() -> None:
    f = Dense()
    f.b.weight.data *= 1000
    spectral_norm(f, kappa=0.8, iterations=100)
    layer = Equilibrium(f, solver="plain", **EXACT)
    assert layer(random(4, 5)).isfinite().all()
    assert layer.last.converged.all()  # type: ignore[union-attr]


def test_bad_input_is_named() -> None:
    with pytest.raises(EquipoiseError, match="kappa = 0 is not allowed"):
        spectral_norm(Dense(), kappa=0)
    with pytest.raises(EquipoiseError, match="iterations = 0 is not allowed"):
        spectral_norm(Dense(), iterations=0)
    with pytest.raises(EquipoiseError, match="no linear layers and no convolutions"):
        weight_norm(nn.ReLU())
    for layer in (weight_norm(Dense()), ContractiveLinear(2, 2), ContractiveConv2d(2, 2, 3)):
        with pytest.raises(EquipoiseError, match="already normalised or projected"):
            spectral_norm(nn.Sequential(layer))
    with pytest.raises(EquipoiseError, match="padding with zeros"):
        spectral_norm(nn.Conv2d(2, 2, 3, padding="same"))


def test_dense_layers_are_left_out_of_nothing() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Conv2d(2, 2, 1)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return z + x

    f = spectral_norm(Two())
    assert [parametrize.is_parametrized(layer, "weight") for layer in (f.a, f.b)] == [True, True]


@pytest.mark.parametrize("normalise", [weight_norm, spectral_norm])
def test_weights_that_are_not_normalised_are_named(normalise: Any) -> None:
    f = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "norm": nn.LayerNorm((2, 2)),
            "up": nn.ConvTranspose2d(2, 2, 2),
            "line": nn.Conv1d(2, 2, 1),
            "look": nn.MultiheadAttention(4, 2),
        }
    )
    with pytest.warns(UserWarning, match="only nn.Linear") as seen:
        normalise(f)
    (warning,) = seen
    named = "up.weight (ConvTranspose2d), line.weight (Conv1d), look.in_proj_weight (MultiheadAttention)"
    assert str(warning.message).endswith(f"stay as they are: {named}")
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normalise(nn.ModuleList([nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.LayerNorm((2, 2))]))
