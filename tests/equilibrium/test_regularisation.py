"""Jacobian regularisation: the estimate against exact Jacobians, its gradient, and the layer's auxiliary loss."""

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.equilibrium import Equilibrium, auxiliary_loss, jacobian_norm, solve, spectral_radius
from equipoise.equilibrium.regularisation import random_like
from equipoise.errors import EquipoiseError
from equipoise.models.blocks import EquilibriumBlock
from tests.support.fixed_points import EXACT, Dense, random


def exact(f: Any, z: Tensor, *inputs: Tensor) -> Tensor:
    """The mean over samples of ‖J‖_F² / d."""
    rows = []
    for k in range(len(z)):
        jacobian = torch.autograd.functional.jacobian(
            lambda one, k=k: f(one, *(x[k : k + 1] for x in inputs)), z[k : k + 1]
        )
        rows.append(jacobian.square().sum() / z[k].numel())
    return torch.stack(rows).mean()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_the_estimate_is_unbiased(distribution: Any) -> None:
    f, z, x = Dense(), random(3, 5), random(3, 5, seed=2)
    n, copies = 50, 200  # a batch of copies has independent probes for each
    many = [t.repeat(copies, 1) for t in (z, x)]
    found = torch.stack(
        [jacobian_norm(f, *many, distribution=distribution, generator=seeded(k)) for k in range(n)]
    ).detach()
    error = float(found.mean() - exact(f, z, x))
    assert abs(error) < 4 * float(found.std()) / n**0.5
    assert float(found.std()) > 1e-3 * float(found.mean())


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.integers(0, 10**6), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_rademacher_probes_are_exact_where_the_columns_of_j_are_orthogonal(
    diagonal: list[float], seed: int, probes: int
) -> None:
    d = torch.tensor(diagonal, dtype=torch.float64)
    z = random(2, len(d))
    found = jacobian_norm(lambda z: d * z, z, probes=probes, generator=seeded(seed))
    torch.testing.assert_close(found, d.square().mean(), rtol=1e-12, atol=1e-12)


def test_several_probes_are_the_mean_of_single_ones() -> None:
    f, z, x = Dense(), random(3, 5), random(3, 5, seed=2)
    source = seeded()
    single = [jacobian_norm(f, z, x, generator=source) for _ in range(3)]
    together = jacobian_norm(f, z, x, probes=3, generator=seeded())
    torch.testing.assert_close(together, torch.stack(single).mean(), rtol=1e-12, atol=0)


def test_probes_have_mean_zero_and_variance_one() -> None:
    z = torch.zeros(100_000, dtype=torch.float64)
    for distribution in ("rademacher", "gaussian"):
        v = random_like(z, distribution, seeded())
        assert abs(float(v.mean())) < 0.02
        assert float(v.square().mean()) == pytest.approx(1, abs=0.03)
    assert set(random_like(z, "rademacher", seeded()).tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("activation", ["relu", "softplus"])
def test_the_gradient_of_the_estimate_is_that_of_finite_differences(activation: Any) -> None:
    torch.manual_seed(0)
    f = EquilibriumBlock(8, 8, activation).double()
    for p in f.parameters():  # away from the small weights of the start
        p.data += 0.1 * torch.randn_like(p)
    z, x = random(2, 8, 4, 4), random(2, 8, 4, 4, seed=2).requires_grad_()

    def value() -> Tensor:
        return jacobian_norm(f, z, x, probes=2, generator=seeded())

    moved = [*f.parameters(), x]
    gradient = torch.autograd.grad(value(), moved, materialize_grads=True)  # the last offset is not in J
    direction = [torch.randn_like(p) for p in moved]
    slope = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True))
    h, at = 1e-6, []
    for sign in (1, -1):
        for p, d in zip(moved, direction, strict=True):
            p.data += sign * h * d
        at.append(float(value()))
        for p, d in zip(moved, direction, strict=True):
            p.data -= sign * h * d
    assert slope == pytest.approx((at[0] - at[1]) / (2 * h), rel=1e-5)


def test_functions_without_z_or_without_gradients_have_the_norm_zero() -> None:
    x = random(2, 3)
    assert jacobian_norm(lambda z, x: x, x, x) == 0
    assert jacobian_norm(lambda z, x: x * z.detach(), x, x.clone().requires_grad_()) == 0
    with torch.no_grad():
        assert not jacobian_norm(Dense(3), x, x).requires_grad


def test_bad_settings_are_named() -> None:
    with pytest.raises(EquipoiseError, match="probes = 0 is not allowed"):
        jacobian_norm(Dense(), random(1, 5), random(1, 5), probes=0)
    with pytest.raises(EquipoiseError, match="distribution = 'uniform' is not allowed"):
        jacobian_norm(Dense(), random(1, 5), random(1, 5), distribution="uniform")  # type: ignore[arg-type]
    with pytest.raises(EquipoiseError, match="jacobian_probability"):
        Equilibrium(Dense(), jacobian_probability=0)


def test_a_layer_has_the_weighted_norm_at_its_fixed_point_as_auxiliary_loss() -> None:
    f, x = Dense(), random(3, 5)
    layer = Equilibrium(f, jacobian_weight=0.3, jacobian_probes=2, **EXACT)
    model = nn.Sequential(layer)
    layer.generator = seeded()
    model(x)
    found = auxiliary_loss(model)
    z = solve(f, torch.zeros_like(x), [x], **EXACT).z
    torch.testing.assert_close(found, 0.3 * jacobian_norm(f, z, x, probes=2, generator=seeded()))
    assert auxiliary_loss(model) is None  # collected once


def test_there_is_no_auxiliary_loss_in_evaluation_without_gradients_or_without_a_weight() -> None:
    x = random(3, 5)
    layer = Equilibrium(Dense(), jacobian_weight=0.3)
    layer.eval()(x)
    assert auxiliary_loss(layer) is None
    with torch.no_grad():
        layer.train()(x)
    assert auxiliary_loss(layer) is None
    plain = Equilibrium(Dense())
    plain(x)
    assert auxiliary_loss(plain) is None
    assert layer.draws
    assert not plain.draws


def test_a_layer_that_is_called_twice_has_the_sum_of_both_losses() -> None:
    layer, x = Equilibrium(Dense(), jacobian_weight=1, **EXACT), random(3, 5)
    layer.generator = seeded()
    layer(x)
    first = auxiliary_loss(layer)
    layer(2 * x)
    second = auxiliary_loss(layer)
    layer.generator = seeded()
    layer(x)
    layer(2 * x)
    assert first is not None
    assert second is not None
    torch.testing.assert_close(auxiliary_loss(layer), first + second)


def test_a_layer_may_be_called_often_in_one_pass_and_losses_that_nobody_collects_cause_one_warning() -> None:
    layer, x = Equilibrium(Dense(), jacobian_weight=1, limit=1), random(1, 5)
    layer.budget, layer.quiet = 1, True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(60):
            layer(x)
    assert auxiliary_loss(layer) is not None
    with pytest.warns(UserWarning, match=r"add auxiliary_loss\(model\)") as seen:
        [layer(x) for _ in range(130)]
    assert len(seen) == 1
    assert seen[0].filename == __file__


@pytest.mark.parametrize("measure", [jacobian_norm, spectral_radius])
def test_states_of_several_tensors_are_one_long_row(measure: Any) -> None:
    f, z, x = Dense(), random(3, 5), random(3, 5, seed=2)

    def parts(state: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        value = f(torch.cat([state["a"].flatten(1), state["b"]], dim=1), x)
        return {"a": value[:, :4].reshape(-1, 2, 2), "b": value[:, 4:]}

    found = measure(parts, {"a": z[:, :4].reshape(-1, 2, 2), "b": z[:, 4:]}, x, generator=seeded())
    torch.testing.assert_close(found, measure(f, z, x, generator=seeded()))


@pytest.mark.parametrize("measure", [jacobian_norm, spectral_radius])
def test_inference_mode_is_refused_where_there_would_be_a_wrong_zero(measure: Any) -> None:
    f, x = Dense(), random(3, 5)
    layer = Equilibrium(f, jacobian_weight=1, spectral_radius=True)
    with torch.inference_mode():
        with pytest.raises(EquipoiseError, match=f"{measure.__name__} needs backward passes"):
            measure(f, x, x)
        layer(x)
    assert layer.solves.forward.measured == 0
    assert auxiliary_loss(layer) is None


def test_random_steps_have_the_loss_as_often_as_asked_for() -> None:
    layer, x = Equilibrium(Dense(), jacobian_weight=1, jacobian_probability=0.3, limit=1), random(1, 5)
    layer.generator, layer.budget = seeded(), 1
    n, seen = 300, 0
    for _ in range(n):
        layer(x)
        seen += auxiliary_loss(layer) is not None
    assert abs(seen - 0.3 * n) < 4 * (n * 0.3 * 0.7) ** 0.5


def test_a_random_step_takes_the_jacobian_at_a_guess_of_the_solve() -> None:
    """With plain iterations from zero, the guesses are 0, f(0), f(f(0)), ... until a sample is done."""
    f, x = Dense(scale=0.9), random(3, 5)
    layer = Equilibrium(f, solver="plain", tol=0, limit=4, jacobian_weight=1, jacobian_at="random-step")
    layer.budget = 4
    guesses = [torch.zeros_like(x)]
    while len(guesses) < 4:
        guesses.append(f(guesses[-1], x).detach())
    expected = [exact(f, z, x) for z in guesses]
    chosen = set()
    for k in range(15):
        layer.generator = seeded(k)
        step = int(torch.rand((), generator=seeded(k)) * 4)
        layer.options = layer.options.model_copy(update={"jacobian_probes": 100})
        layer(x)
        chosen.add(step)
        assert float(auxiliary_loss(layer)) == pytest.approx(float(expected[step]), rel=0.25)  # type: ignore[arg-type]
    assert chosen == {0, 1, 2, 3}


def test_guesses_are_those_of_the_iterations_and_then_the_last() -> None:
    f, x = Dense(scale=0.5), random(3, 5)
    found = solve(f, torch.zeros_like(x), [x], solver="plain", tol=1e-6, limit=100, record=(0, 2, 99))
    assert torch.equal(found.guesses[0], torch.zeros_like(x))
    torch.testing.assert_close(found.guesses[1], f(f(torch.zeros_like(x), x), x))
    assert torch.equal(found.guesses[2], found.z)


def test_training_with_the_loss_alone_shrinks_the_jacobian() -> None:
    torch.manual_seed(0)
    f, x = Dense(scale=0.99), random(20, 5)
    model = nn.Sequential(Equilibrium(f, jacobian_weight=1, tol=1e-6, limit=100))
    before = exact(f, x, x)
    step = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(10):
        model(x)
        loss = auxiliary_loss(model)
        assert loss is not None
        step.zero_grad()
        loss.backward()
        step.step()
    assert exact(f, x, x) < 0.5 * before


def test_copies_share_neither_losses_nor_random_numbers() -> None:
    layer = Equilibrium(Dense(), jacobian_weight=1)
    layer.generator = seeded()
    layer(random(1, 5))
    other = copy.deepcopy(layer)
    assert other.generator is None
    assert auxiliary_loss(other) is None
    assert auxiliary_loss(layer) is not None
