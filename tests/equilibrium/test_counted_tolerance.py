"""Which solves count as converged, where that is not decided by the tolerance at which they stop."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.equilibrium import Equilibrium
from equipoise.errors import EquipoiseError

RATES = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 0.97], dtype=torch.float64).unsqueeze(1)


def affine(z: Tensor, u: Tensor, rate: Tensor) -> Tensor:
    """z = rate z + u, whose plain iteration has a residual that is known."""
    return rate * z + u


def residuals(k: int) -> tuple[Tensor, Tensor]:
    """After k evaluations: from z = 0 the sum of a geometric series; for the gradient, from v instead of 0."""
    forward = RATES ** (k - 1) * (1 - RATES) / (1 - RATES**k)
    backward = RATES**k * (1 - RATES) / (1 - RATES ** (k + 1))
    return forward.flatten(), backward.flatten()


@given(k=st.integers(1, 12), counted=st.floats(1e-4, 0.9), budgeted=st.booleans())
def test_all_iterations_are_performed_and_residuals_are_counted(k: int, counted: float, budgeted: bool) -> None:
    layer = Equilibrium(affine, solver="plain", tol=0.0, counted_tol=counted, limit=30 if budgeted else k)
    layer.budget = k if budgeted else None
    u = torch.ones(len(RATES), 1, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # they did what they were asked to
        layer(u, RATES).sum().backward()
    for stats, residual in zip((layer.solves.forward, layer.solves.backward), residuals(k), strict=True):
        assert stats.iterations == k * len(RATES)
        near = ((residual - counted).abs() < 1e-12).any()
        assert near or stats.unconverged == stats.intended == int((residual > counted).sum())


def test_without_such_a_tolerance_no_solve_of_tol_zero_counts_and_none_of_a_budget_fails() -> None:
    for budget, failed in ((None, len(RATES)), (4, 0)):
        layer = Equilibrium(affine, solver="plain", tol=0.0, limit=5)
        layer.budget = budget
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(torch.ones_like(RATES), RATES)
        assert layer.tally.unconverged == failed
        assert layer.tally.unexpected == 0


def test_solves_that_should_converge_are_still_complained_of() -> None:
    layer = Equilibrium(affine, solver="plain", tol=1e-6, counted_tol=2e-2, limit=10)
    with pytest.warns(UserWarning, match=r"in 2 of 6 solves: after 10 iterations .* should be 0\.02"):
        layer(torch.ones_like(RATES), RATES)
    assert int((residuals(10)[0] > 2e-2).sum()) == 2


def test_what_diverges_is_never_intended() -> None:
    layer = Equilibrium(lambda z, u: 1e200 * z * z + u, solver="plain", tol=0.0, limit=9)
    with pytest.warns(UserWarning, match="diverged"):
        layer(torch.ones(2, 1, dtype=torch.float64))
    assert (layer.tally.diverged, layer.tally.intended) == (2, 0)


@pytest.mark.parametrize("more", [{"tol": 1e-2}, {"tol": 1e-4, "backward_tol": 1e-2}])
def test_it_is_not_below_the_tolerance_at_which_solves_stop(more: dict[str, float]) -> None:
    with pytest.raises(EquipoiseError, match=r"counted_tol = 0\.001 is below the tolerance 0\.01"):
        Equilibrium(affine, counted_tol=1e-3, **more)
