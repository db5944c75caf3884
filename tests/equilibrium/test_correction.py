"""Fixed-point correction: states on the way to the fixed point, and the sum of their losses."""

import pytest
import torch

from equipoise.equilibrium import Equilibrium, correction_loss
from equipoise.equilibrium.correction import evenly_spaced
from equipoise.errors import EquipoiseError
from tests.support.fixed_points import EXACT, Dense, random


def test_states_are_those_of_plain_iterations_by_hand() -> None:
    """f(z, x) = z/2 + x from zero: x, 3x/2, 7x/4, ... and 2x in the end."""
    x = random(2, 3)
    layer = Equilibrium(lambda z, x: 0.5 * z + x, solver="plain", **EXACT)
    found = layer.states(x, at=(0, 1, 2))
    for state, factor in zip(found, (1, 1.5, 1.75, 2), strict=True):
        torch.testing.assert_close(state, factor * x, rtol=1e-8, atol=1e-8)


def test_states_have_the_gradient_of_one_step_and_the_last_that_of_the_layer() -> None:
    x, w = random(2, 3), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    layer = Equilibrium(lambda z, x: w * z + x, solver="plain", **EXACT)
    first, second, last = layer.states(x, at=(0, 1))
    for state, before in ((first, 0 * x), (second, x)):  # d(w z + x)/dw = z, with z as a constant
        (gradient,) = torch.autograd.grad(state.sum(), w)
        torch.testing.assert_close(gradient, before.sum())
    (gradient,) = torch.autograd.grad(last.sum(), w)  # x / (1 - w)
    torch.testing.assert_close(gradient, 4 * x.sum(), rtol=1e-6, atol=0)


def test_one_state_is_the_layer_itself_and_the_loss_the_plain_loss() -> None:
    f, x = Dense(), random(3, 5)
    layer = Equilibrium(f, **EXACT)
    (only,) = layer.states(x, n=1)
    assert torch.equal(only, layer(x))
    assert torch.equal(correction_loss([only], torch.sum, 0.3), only.sum())
    assert torch.equal(correction_loss(layer.states(x, n=3), torch.sum, 0.0), only.sum())


def test_the_weights_are_powers_of_gamma_with_one_for_the_last() -> None:
    states = [torch.tensor(100.0), torch.tensor(10.0), torch.tensor(1.0)]
    assert float(correction_loss(states, lambda z: z, 0.5)) == 1 + 0.5 * 10 + 0.25 * 100
    assert float(correction_loss(states, lambda z: z, 1.0)) == 111


def test_iterations_are_evenly_spaced() -> None:
    assert evenly_spaced(1, 10) == ()
    assert evenly_spaced(2, 10) == (5,)
    assert evenly_spaced(5, 10) == (2, 4, 6, 8)
    assert evenly_spaced(3, 3) == (1, 2)


def test_later_states_are_nearer_to_the_fixed_point() -> None:
    f, x = Dense(scale=0.9), random(6, 5)
    layer = Equilibrium(f, solver="plain", tol=1e-12, limit=40)
    layer.budget = 40
    states = layer.states(x, n=4)
    errors = [float((state - states[-1]).norm()) for state in states]
    assert len(states) == 4
    assert errors[0] > errors[1] > errors[2] > errors[3] == 0


def test_bad_input_is_named() -> None:
    layer, x = Equilibrium(Dense(), limit=5), random(1, 5)
    with pytest.raises(EquipoiseError, match="n = 6 is not allowed; it must be a whole number from 1 to the limit, 5"):
        layer.states(x, n=6)
    with pytest.raises(EquipoiseError, match="at = \\(-1,\\) is not allowed"):
        layer.states(x, at=(-1,))
    with pytest.raises(EquipoiseError, match="gamma = -1 is not allowed"):
        correction_loss([x], torch.sum, -1)
    with pytest.raises(EquipoiseError, match="at least one state"):
        correction_loss([], torch.sum)
    with pytest.raises(EquipoiseError, match="'unroll' has none"):
        Equilibrium(Dense(), gradient="unroll").states(x)
