"""The spectral radius against the eigenvalues of small matrices, whatever their largest eigenvalues are."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.equilibrium import Equilibrium, spectral_radius
from equipoise.errors import EquipoiseError
from tests.support.fixed_points import EXACT, Dense, random


def measured(matrix: np.ndarray | Tensor, samples: int = 2, **given: Any) -> Tensor:
    m = torch.as_tensor(matrix)
    generator = torch.Generator().manual_seed(0)
    return spectral_radius(lambda z: z @ m.T, random(samples, len(m)), generator=generator, **given)


def with_eigenvalues(blocks: list[list[list[float]]], seed: int) -> np.ndarray:
    """A matrix similar to these blocks on the diagonal; not symmetric."""
    size = sum(len(b) for b in blocks)
    d, at = np.zeros((size, size)), 0
    for block in blocks:
        d[at : at + len(block), at : at + len(block)] = block
        at += len(block)
    basis = np.eye(size) + 0.3 * np.random.default_rng(seed).normal(size=(size, size)) / size**0.5
    found: np.ndarray = basis @ d @ np.linalg.inv(basis)
    return found


@pytest.mark.parametrize(
    ("blocks", "largest"),
    [
        ([[[0.9]], [[0.4]], [[-0.3]]], 0.9),
        ([[[-1.7]], [[0.9]], [[0.2]]], 1.7),
        ([[[0.8]], [[-0.8]], [[0.1]], [[0.3]]], 0.8),  # two of equal size
        ([[[0.3, -0.9], [0.9, 0.3]], [[0.4]], [[0.1]]], (0.3**2 + 0.9**2) ** 0.5),  # a complex pair
        ([[[0.0]], [[0.0]]], 0.0),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_the_largest_eigenvalue_also_of_pairs(blocks: Any, largest: float, seed: int) -> None:
    found = measured(with_eigenvalues(blocks, seed), iterations=40)
    torch.testing.assert_close(found, torch.full((2,), largest, dtype=torch.float64), rtol=1e-5, atol=1e-9)


@given(st.integers(0, 10**6), st.integers(2, 5), st.booleans())
@settings(max_examples=10, deadline=None)
def test_many_iterations_agree_with_a_dense_solver(seed: int, size: int, symmetric: bool) -> None:
    matrix = np.random.default_rng(seed).normal(size=(size, size))
    matrix = matrix + matrix.T if symmetric else matrix
    by_size = np.sort(np.abs(np.linalg.eigvals(matrix)))[::-1]
    found = measured(matrix, 1, iterations=200)
    # Where further eigenvalues are nearly as large as the first two, iterations cannot tell them apart.
    if size > 2 and by_size[2] > 0.95 * by_size[1]:
        assert by_size[2] * 0.5 < float(found) < np.linalg.norm(matrix, 2) * (1 + 1e-9)
    else:
        assert float(found) == pytest.approx(by_size[0], rel=5e-3)


def test_samples_have_their_own_radius_at_their_own_fixed_point() -> None:
    f, x = Dense(scale=0.95), 2 * random(4, 5)
    z = Equilibrium(f, **EXACT)(x).detach()
    found = spectral_radius(f, z, x, iterations=200, generator=torch.Generator().manual_seed(0))
    for k in range(4):
        jacobian = torch.autograd.functional.jacobian(lambda one, k=k: f(one, x[k : k + 1])[0], z[k : k + 1])
        eigenvalues = np.linalg.eigvals(jacobian[:, 0].numpy())
        assert float(found[k]) == pytest.approx(np.abs(eigenvalues).max(), rel=1e-3)
    assert len(set(found.tolist())) == 4


def test_the_largest_of_several_probes_counts() -> None:
    matrix = np.diag([1.0, 0.99, 0.98, 0.97])
    one = measured(matrix, 8, iterations=1)
    several = measured(matrix, 8, iterations=1, probes=4)
    assert (several >= one).all()
    assert (several > one).any()


def test_constants_have_radius_zero_and_nan_is_reported_as_nan() -> None:
    z = random(3, 2)
    assert spectral_radius(lambda z, x: x, z, z).tolist() == [0, 0, 0]
    assert spectral_radius(lambda z: z * torch.tensor([1.0, torch.nan]), z).isnan().all()
    with pytest.raises(EquipoiseError, match="iterations = 0 is not allowed"):
        spectral_radius(lambda z: z, z, iterations=0)


def test_images_with_channels_last_are_measured_as_well() -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 3, 3, padding=1, bias=False, dtype=torch.float64)
    z = random(1, 3, 4, 4)
    dense = torch.autograd.functional.jacobian(conv, z).reshape(48, 48).numpy()
    expected = np.abs(np.linalg.eigvals(dense)).max()
    for layout in (torch.contiguous_format, torch.channels_last):
        found = spectral_radius(
            conv, z.contiguous(memory_format=layout), iterations=500, generator=torch.Generator().manual_seed(0)
        )
        assert float(found) == pytest.approx(expected, rel=1e-2)


def test_a_layer_measures_once_per_statistics_and_only_in_training() -> None:
    f, x = Dense(), random(3, 5)
    layer = Equilibrium(f, spectral_radius=True, **EXACT)
    layer.eval()(x)
    assert layer.solves.forward.measured == 0
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    layer.train()
    layer(x)
    layer(2 * x)
    assert torch.equal(torch.random.get_rng_state(), before)  # measuring does not change training
    assert layer.solves.forward.measured == 3
    exact = spectral_radius(f, layer(x).detach(), x, generator=torch.Generator().manual_seed(0))
    assert layer.solves.forward.radius == pytest.approx(float(exact.sum()), rel=1e-6)


def test_empty_batches_and_small_dtypes_are_measured() -> None:
    f, x = Dense(), random(3, 5)
    assert spectral_radius(f, x[:0], x[:0]).shape == (0,)
    Equilibrium(f, spectral_radius=True)(x[:0])
    assert spectral_radius(lambda z: 0.5 * z, torch.ones(3)).tolist() == [0.5, 0.5, 0.5]  # without further axes
    exact = spectral_radius(f, x, x, generator=torch.Generator().manual_seed(0))
    small = x.bfloat16()
    rough = spectral_radius(f.bfloat16(), small, small, generator=torch.Generator().manual_seed(0))
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.double(), exact, rtol=0.05, atol=0)
