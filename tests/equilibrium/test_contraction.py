"""What keeps an equilibrium well posed: projections, bounds, and that training stays within them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn

from equipoise.equilibrium import (
    ContractiveConv2d,
    ContractiveLinear,
    Equilibrium,
    conv_norm_bound,
    project,
    project_rows,
    projected,
)
from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from tests.support.fixed_points import random

ACTIVATIONS = [torch.relu, torch.tanh, F.softplus]


@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(0.05, 3.0))
@settings(max_examples=25)
def test_the_projection_is_the_nearest_point_that_an_optimiser_finds(seed: int, d: int, radius: float) -> None:
    """min ‖p - q - w‖² over p, q >= 0 with Σ (p + q) <= radius."""
    w = random(1, d, seed=seed).numpy()[0]
    reference = minimize(
        lambda v: np.square(v[:d] - v[d:] - w).sum(),
        np.zeros(2 * d),
        jac=lambda v: np.concatenate([2 * (v[:d] - v[d:] - w), -2 * (v[:d] - v[d:] - w)]),
        bounds=[(0, None)] * (2 * d),
        constraints={"type": "ineq", "fun": lambda v: radius - v.sum(), "jac": lambda v: -np.ones(2 * d)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    ours = project_rows(torch.from_numpy(w)[None], radius)[0].numpy()
    np.testing.assert_allclose(ours, reference.x[:d] - reference.x[d:], atol=2e-6)


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 300), st.floats(0.01, 5.0), st.floats(0.01, 10.0))
@settings(max_examples=60)
def test_the_projection_is_characterised_by_obtuse_angles(
    seed: int, rows: int, d: int, radius: float, scale: float
) -> None:
    """p is the projection of w onto a convex set if and only if p is in it and ⟨w - p, v - p⟩ <= 0 for all v in it.

    A linear function is largest at a corner of the ball, ± radius along an axis.
    """
    w = scale * random(rows, d, seed=seed)
    p = project_rows(w, radius)
    assert (p.abs().sum(1) <= radius * (1 + 1e-12)).all()
    away = w - p
    assert (radius * away.abs().amax(1) - (away * p).sum(1) <= 1e-9 * (1 + scale) * d).all()
    inside = w.abs().sum(1) <= radius
    assert torch.equal(p[inside], w[inside])
    torch.testing.assert_close(project_rows(p, radius), p, rtol=1e-12, atol=1e-14)


def test_rows_do_not_mix_and_zero_stays() -> None:
    w = torch.stack([random(5), torch.zeros(5).double(), 100 * random(5, seed=1)])
    together = project_rows(w, 0.5)
    for k in range(3):
        assert torch.equal(together[k : k + 1], project_rows(w[k : k + 1], 0.5))
    assert not together[1].any()


def operator_norm(weight: Tensor, side: int) -> float:
    """Of the convolution as the matrix that it is on images of this size."""
    _, i, h, w = weight.shape
    basis = torch.eye(i * side * side, dtype=weight.dtype).view(-1, i, side, side)
    image = F.conv2d(basis, weight, padding=(h // 2, w // 2)).flatten(1)
    return float(torch.linalg.matrix_norm(image, ord=2))


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 3, 5]), st.integers(1, 7))
@settings(max_examples=30)
def test_the_bound_holds_for_the_convolution_on_images_of_any_size(
    seed: int, inputs: int, outputs: int, kernel: int, side: int
) -> None:
    weight = random(outputs, inputs, kernel, kernel, seed=seed)
    bound = float(conv_norm_bound(weight))
    assert operator_norm(weight, side) <= bound * (1 + 1e-9)
    assert bound <= kernel * float(torch.linalg.matrix_norm(weight.flatten(1), ord=2)) * (1 + 1e-9)
    if kernel == 1:  # then it is the norm itself
        assert operator_norm(weight, side) == pytest.approx(bound, rel=1e-9)


@given(st.integers(0, 10_000), st.integers(1, 8), st.floats(0.05, 0.99), st.sampled_from(range(3)))
@settings(max_examples=50)
def test_a_projected_layer_is_a_contraction(seed: int, d: int, kappa: float, which: int) -> None:
    """‖φ(Bz + u) - φ(Bz' + u)‖_∞ <= κ ‖z - z'‖_∞ for every component-wise non-expansive φ."""
    b = project_rows(3 * random(d, d, seed=seed), kappa)
    assert float(torch.linalg.matrix_norm(b, ord=torch.inf)) <= kappa * (1 + 1e-12)
    z, other, u = (10 * random(d, seed=seed + k) for k in (1, 2, 3))
    phi = ACTIVATIONS[which]
    before = (z - other).abs().max()
    after = (phi(b @ z + u) - phi(b @ other + u)).abs().max()
    assert after <= kappa * before * (1 + 1e-12) + 1e-14


@given(st.integers(0, 10_000), st.floats(0.05, 0.95))
@settings(max_examples=20)
def test_a_mean_of_projected_layers_is_projected(seed: int, kappa: float) -> None:
    """What a server makes of its clients' matrices stays well posed."""
    matrices = [project_rows(random(6, 6, seed=seed + k), kappa) for k in range(4)]
    weights = torch.softmax(random(4, seed=seed), dim=0)
    mean = sum(w * m for w, m in zip(weights, matrices, strict=True))
    torch.testing.assert_close(project_rows(mean, kappa), mean)


@pytest.mark.parametrize(
    "layer", [ContractiveLinear(7, 7, 0.6), ContractiveConv2d(4, 6, 3, 0.6, padding=1)], ids=lambda m: type(m).__name__
)
def test_layers_begin_and_stay_where_they_should(layer: nn.Module) -> None:
    def norm() -> float:
        weight = layer.weight.detach()
        return operator_norm(weight, 5) if weight.ndim == 4 else float(torch.linalg.matrix_norm(weight, ord=torch.inf))

    assert norm() <= 0.6 * (1 + 1e-5)
    before = layer.weight.detach().clone()
    project(layer)
    torch.testing.assert_close(layer.weight.detach(), before)  # what is within is left alone
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert norm() > 1
    project(nn.Sequential(nn.Identity(), layer))
    assert norm() <= 0.6 * (1 + 1e-5)


def test_a_network_of_contractive_convolutions_has_a_fixed_point_wherever_it_starts() -> None:
    conv = ContractiveConv2d(3, 3, 3, 0.9, padding=1, bias=False).double()
    with torch.no_grad():
        conv.weight.mul_(50)
    project(conv)
    layer = Equilibrium(lambda z, x: torch.relu(conv(z) + x), solver="plain", tol=1e-10, limit=400)
    x = random(4, 3, 6, 6)
    torch.testing.assert_close(layer(x), layer(x, z=100 * random(4, 3, 6, 6, seed=1)), rtol=1e-6, atol=1e-7)
    assert layer.last is not None
    assert layer.last.converged.all()


def test_wrong_bounds_and_convolutions_are_refused() -> None:
    for kappa in (0.0, 1.0, -1.0):
        with pytest.raises(EquipoiseError, match=r"kappa = .* is not allowed; it must be a number > 0 and < 1"):
            ContractiveLinear(2, 2, kappa)
    with pytest.raises(EquipoiseError, match="stride 1, one group"):
        ContractiveConv2d(2, 2, 3, 0.5, stride=2)


@pytest.mark.parametrize("name", ["deq-resnet-s", "deq-residual", "deq-cnn", "deq-mlp"])
def test_models_begin_where_their_contraction_keeps_them(name: str) -> None:
    module = MODELS[name](contraction=True, kappa=0.3).build((1, 8, 8), 3)
    found = projected(module)
    assert found
    before = [layer.weight.detach().clone() for layer in found]
    project(module)
    for layer, weight in zip(found, before, strict=True):
        torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-5, atol=1e-8)
    assert not projected(MODELS[name](contraction=False).build((1, 8, 8), 3))
