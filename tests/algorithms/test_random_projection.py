"""The random projection: orthonormal rows, its transpose, and no matrix."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.algorithms._random_projection import Projection, projection

sizes = st.integers(1, 40).flatmap(lambda d: st.tuples(st.just(d), st.integers(1, d)))


@given(sizes, st.integers(0, 5))
@settings(max_examples=60)
def test_rows_are_orthonormal_and_back_is_the_transpose(size: tuple[int, int], seed: int) -> None:
    d, d_sub = size
    p = Projection(d, d_sub, seed)
    matrix = p(torch.eye(d).double()).T
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(d_sub).double(), rtol=0, atol=1e-14)
    torch.testing.assert_close(p.back(torch.eye(d_sub).double()), matrix, rtol=0, atol=1e-15)
    stack = torch.randn(3, d, dtype=torch.float64)
    torch.testing.assert_close(p(stack), stack @ matrix.T)


def test_the_seed_fixes_it_and_another_seed_is_another() -> None:
    v = torch.randn(50)
    assert torch.equal(projection(50, 7, 1)(v), Projection(50, 7, 1)(v))
    assert not torch.equal(projection(50, 7, 1)(v), projection(50, 7, 2)(v))


def test_lengths_shrink_as_a_random_subspace_has_it() -> None:
    """On average over projections, ||P v||^2 is d_sub / d of ||v||^2."""
    v = torch.randn(200, dtype=torch.float64)
    parts = [Projection(200, 20, seed)(v).square().sum() / v.square().sum() for seed in range(400)]
    assert abs(torch.stack(parts).mean().item() - 0.1) < 0.005


def test_long_vectors_need_no_matrix() -> None:
    """As a matrix it would have 4e11 numbers."""
    p = Projection(2_000_000, 200_000, 0)
    v = torch.randn(2_000_000)
    torch.testing.assert_close(p(p.back(p(v))), p(v), rtol=1e-4, atol=1e-5)
