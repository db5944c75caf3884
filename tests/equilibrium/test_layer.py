"""The layer as its users meet it: starts, budgets, warm starts, complaints, copies."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.equilibrium import Anderson, Equilibrium, NotConverged, WarmStart, layers, set_budget, solve
from equipoise.errors import EquipoiseError
from tests.support.fixed_points import EXACT, Dense, Recorded, random


def test_it_starts_from_zero_from_the_input_or_from_where_it_is_told() -> None:
    f = Recorded()
    x, z = random(2, 3), random(2, 3, seed=2)
    for given_z, start, first in ((None, "zero", 0 * x), (None, "input", x), (z, "zero", z), (z, "input", z)):
        f.seen.clear()
        Equilibrium(f, start=start, **EXACT)(x, z=given_z)
        assert torch.equal(f.seen[0], first)


def test_several_inputs_and_functions_that_are_no_modules() -> None:
    layer = Equilibrium(lambda z, x, w: 0.5 * z + x * w, **EXACT)
    x, w = random(3, 4), random(3, 4, seed=2).requires_grad_()
    out = layer(x, w)
    torch.testing.assert_close(out, 2 * x * w, rtol=1e-8, atol=1e-8)
    (gradient,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(gradient, 2 * x, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_a_budget_binds_both_ways_and_it_says_what_it_used(k: int) -> None:
    f = Dense(scale=0.99)
    model = nn.Sequential(Equilibrium(f, solver="plain", **EXACT))
    set_budget(model, k)
    f.samples = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a budget that runs out is no surprise
        out = model(random(4, 5).requires_grad_())
    assert f.samples == 4 * k + 4  # and once more to leave a trace for the gradient
    out.sum().backward()
    layer = model[0]
    assert layer.last.iterations.tolist() == [k] * 4
    assert layer.last_backward.iterations.tolist() == [k] * 4
    assert (layer.tally.solves, layer.tally.iterations, layer.tally.unconverged) == (4, 4 * k, 0)
    set_budget(model, None)
    model(random(4, 5))
    assert int(layer.last.iterations.min()) > k


def test_a_budget_is_the_most_and_not_the_least() -> None:
    layer = Equilibrium(Dense(scale=0.8), solver="plain", tol=1e-1, limit=20)
    layer(random(4, 5))
    needed = layer.last.iterations
    layer.budget = 15
    layer(random(4, 5))
    assert torch.equal(layer.last.iterations, needed)
    layer.options = layer.options.model_copy(update={"tol": 0.0})
    layer(random(4, 5))
    assert layer.last.iterations.tolist() == [15] * 4


@pytest.mark.parametrize("k", [0, -1, 2.5, "3", True])
def test_a_budget_is_a_whole_number(k: Any) -> None:
    with pytest.raises(EquipoiseError, match=r"a budget of .* iterations is not allowed"):
        set_budget(nn.Identity(), k)


def test_who_does_not_converge_is_told_once_and_again_when_it_is_much_worse() -> None:
    f = Dense(scale=0.9)
    model = nn.Sequential(nn.Identity(), Equilibrium(f, solver="plain", tol=1e-6, limit=5))
    list(layers(model))

    def told() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model(random(3, 5))
        assert all(issubclass(w.category, NotConverged) for w in caught)
        return [str(w.message) for w in caught]

    (text,) = told()
    assert re.search(r"layer '1' did not converge in 3 of 3 .* residual is up to 0\.\d+, and should be 1e-06", text)
    assert told() == []
    f.b.weight.data *= 100
    assert len(told()) == 1
    assert model[1].tally.unconverged == 27


def test_a_layer_that_diverges_says_so_and_returns_numbers() -> None:
    layer = Equilibrium(lambda z, x: 3 * z * z + x, solver="plain", limit=100)
    with pytest.warns(NotConverged, match=r"diverged: 2 of 2 solves met NaN or infinite numbers"):
        out = layer(torch.ones(2, 3))
    assert out.isfinite().all()
    assert layer.tally.diverged == 2


def test_a_converged_layer_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Equilibrium(Dense(), **EXACT)(random(3, 5))


def test_a_copy_counts_for_itself_and_remembers_nothing() -> None:
    layer = Equilibrium(Dense(), **EXACT)
    warm = WarmStart(nn.Sequential(layer), 3)
    with warm.at(torch.arange(3)):
        layer(random(3, 5))
        other = copy.deepcopy(layer)
    assert other.memory is None
    assert other.tally.solves == 0
    assert other.f is not layer.f
    assert torch.equal(other(random(3, 5)), layer(random(3, 5)))


def test_options_come_one_by_one_or_as_one() -> None:
    options = Equilibrium(Dense(), **EXACT).options
    assert Equilibrium(Dense(), options).options == options
    with pytest.raises(EquipoiseError, match="not both"):
        Equilibrium(Dense(), options, tol=0.1)
    with pytest.raises(EquipoiseError, match=r"Equilibrium.solver = 'newton' is not allowed; it must be 'anderson'"):
        Equilibrium(Dense(), solver="newton")


def test_a_gradient_that_does_not_converge_is_told_and_counted() -> None:
    layer = Equilibrium(Dense(scale=0.9), backward_limit=1, **EXACT)
    out = layer(random(3, 5).requires_grad_())
    with pytest.warns(NotConverged, match="the gradient of the equilibrium layer of Dense did not converge in 3 of 3"):
        out.sum().backward()
    assert layer.solves.backward.unconverged == 3
    assert layer.solves.forward.unconverged == 0


def test_unrolled_training_counts_and_remembers_too() -> None:
    layer = Equilibrium(Dense(scale=0.5), gradient="unroll", tol=1e-6, limit=40)
    x = random(3, 5)
    warm = WarmStart(layer, 3)
    with warm.at([0, 1, 2]):
        out = layer(x)
    assert layer.last.iterations.tolist() == [40] * 3
    assert layer.last.converged.all()
    torch.testing.assert_close(warm.tensors()["0.z"], out.detach())
    wild = Equilibrium(lambda z, x: 3 * z * z + x, gradient="unroll", limit=100)
    with pytest.warns(NotConverged, match="diverged: 2 of 2"):
        wild(torch.ones(2, 3))
    with pytest.raises(EquipoiseError, match="the shape"):
        Equilibrium(lambda z, x: z[:, :1], gradient="unroll")(x)


def test_a_complaint_points_at_the_users_own_line() -> None:
    layer = nn.Sequential(Equilibrium(Dense(scale=0.9), solver="plain", tol=1e-9, limit=2))
    with pytest.warns(NotConverged) as told:
        layer(random(2, 5))
    assert told[0].filename == __file__


def test_layers_that_change_from_call_to_call_are_told() -> None:
    with pytest.warns(UserWarning, match="f has a BatchNorm1d, so that f"):
        Equilibrium(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    with pytest.warns(UserWarning, match="f has a Dropout, so that f"):
        Equilibrium(nn.Dropout())


def test_what_follows_may_work_in_place() -> None:
    layer, x = Equilibrium(Dense(), **EXACT), random(3, 5).requires_grad_()
    (inplace,) = torch.autograd.grad(nn.Sequential(layer, nn.ReLU(inplace=True))(x).sum(), x)
    (usual,) = torch.autograd.grad(nn.Sequential(layer, nn.ReLU())(x).sum(), x)
    torch.testing.assert_close(inplace, usual)


def test_a_solver_may_be_an_object() -> None:
    layer = Equilibrium(Dense(), solver=Anderson(window=3, mixing=0.5))
    assert (layer.options.solver, layer.options.window, layer.options.mixing) == ("anderson", 3, 0.5)
    x = random(2, 5)
    torch.testing.assert_close(solve(Dense(), 0 * x, x, solver="broyden").f, layer(x), rtol=1e-2, atol=1e-2)


def test_what_samples_share_belongs_into_f() -> None:
    x, shared = random(5, 8), random(9, 8)
    for wrong in (shared, random(8), random(1, 8), torch.tensor(1.0)):
        with pytest.raises(EquipoiseError, match=r"input 2 of an equilibrium has shape .* belongs in f"):
            Equilibrium(lambda z, x, c: 0.5 * z + x)(x, wrong)
    scaled = Equilibrium(lambda z, x, scale, mask: scale * z + x, **EXACT)
    torch.testing.assert_close(scaled(x, 0.5, None), 2 * x, rtol=1e-8, atol=1e-8)  # what is no tensor is passed on


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda x: Equilibrium(Dense), "needs a module or a function"),
        (lambda x: Equilibrium(Dense(), "anderson"), "must be an Options object, not 'anderson'"),
        (lambda x: Equilibrium(Dense())(), "needs an input, or a guess"),
        (lambda x: Equilibrium(Dense())(x.long()), "a floating-point tensor, not torch.int64"),
        (lambda x: Equilibrium(Dense())(x, z=x[:2]), "needs one row for each of the 2 samples"),
        (lambda x: Equilibrium(lambda z, x: (z, x))(x), "is a tuple"),
        (lambda x: Equilibrium(lambda z, x: z[:1])(x), "must have the shape of z"),
        (lambda x: Equilibrium(lambda z, x: z.mul_(0.5).add_(x))(x), "f changes z in place"),
        (lambda x: solve(Dense(), x, [x], solver="newton"), "available: anderson, broyden, plain"),
        (lambda x: solve(Dense(), x, [x], tol=-1.0), "tol = -1.0 is not allowed"),
        (lambda x: solve(Dense(), x, [x], tol=float("nan")), "tol = nan is not allowed"),
        (lambda x: solve(Dense(), x, [x], limit=0), "limit = 0 is not allowed"),
        (lambda x: WarmStart(Dense(), -1), "samples = -1 is not allowed"),
    ],
)
def test_mistakes_get_a_sentence(call: Any, complaint: str) -> None:
    with pytest.raises(EquipoiseError, match=complaint):
        call(random(3, 5))


def test_an_f_that_forgets_z_is_a_layer_too() -> None:
    x = random(2, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(Equilibrium(lambda z, x: torch.tanh(x), **EXACT)(x).sum(), x)
    torch.testing.assert_close(gradient, 1 - torch.tanh(x.detach()) ** 2)


@pytest.mark.parametrize("gradient", ["implicit", "jacobian-free", "unroll"])
def test_an_empty_batch_goes_through(gradient: str) -> None:
    layer = Equilibrium(Dense(), gradient=gradient, **EXACT)
    out = layer(random(0, 5))
    out.sum().backward()
    assert out.shape == (0, 5)
    assert layer.tally.solves == 0
