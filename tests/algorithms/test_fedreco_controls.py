"""FedReCo's controls: probes that do not follow the clients, own initialisations, and full variance reduction."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from equipoise.algorithms import FeatureDecay, FedReCo
from equipoise.algorithms.fedreco import Discord
from equipoise.data.federation import Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.executors.thread_trainer import ThreadTrainer
from equipoise.models.base import BodyAndHead
from equipoise.parameter_space import ParameterSpace
from equipoise.state import State
from tests.support.marks import slow_except
from tests.support.problems import FULL, classification, simulation

MODES = slow_except(["threads", "stacked"], "threads")
CONTROLS = ("initial", "other", "zero")


def small() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BodyAndHead(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 3))


def trained(mode: str = "threads", rounds: int = 2, **settings: Any) -> Simulation:
    algorithm = FedReCo(**{"lam": 0.4, "lr": 0.1, "batch": 4, **settings})
    run = simulation(algorithm, classification(4), small(), mode=mode, rounds=rounds, participation=1.0)
    run.run()
    return run


def models(run: Simulation) -> Tensor:
    return torch.stack([run.store.get(who).w for who in range(len(run.federation))])


@pytest.mark.parametrize("probe", CONTROLS)
def test_a_probe_that_does_not_follow_needs_no_messages(probe: str) -> None:
    run = trained(probe=probe)
    assert not run.schema.up
    assert run.counters.bytes_up == 0
    assert torch.equal(run.server.u_0, simulation(run.algorithm, module=small()).server.u_0)


def test_the_initial_probe_is_one_with_rate_zero() -> None:
    still, initial = trained(server_lr=0.0), trained(probe="initial")
    assert torch.equal(models(still), models(initial))
    assert not torch.allclose(models(initial), models(trained(server_lr=0.5)))


@pytest.mark.parametrize("mode", MODES)
def test_a_zero_probe_is_a_penalty_on_the_size_of_representations(mode: str) -> None:
    run = trained(mode, rounds=1, probe="zero", batch=FULL)
    space, module = run.task.space, run.task.module
    for who in range(len(run.federation)):
        x, y = run.federation.gather(torch.from_numpy(run.federation.train[who]))

        def gradient(w: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
            w = w.clone().requires_grad_()
            views = space.views(w)
            h = functional_call(module.body, _of("body", views), (x,))
            f = nn.functional.cross_entropy(functional_call(module.head, _of("head", views), (h,)), y)
            return torch.autograd.grad(f + 0.4 / 2 * h.square().sum(-1).mean(), w)[0]

        w = run.task.w0.clone()
        for part in (space.part("head"), space.part("body")):
            w[part] -= 0.1 * gradient(w)[part]
        torch.testing.assert_close(run.store.get(who).w, w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_feature_decay_is_fedreco_with_a_zero_probe_to_the_last_bit(mode: str) -> None:
    settings = {"lam": 0.4, "lr": 0.1, "batch": 4, "head_epochs": 2, "head_lr": 0.05, "momentum": 0.5}
    run = simulation(FeatureDecay(**settings), classification(4), small(), mode=mode, rounds=3, participation=0.5)
    run.run()
    other = simulation(
        FedReCo(probe="zero", **settings), classification(4), small(), mode=mode, rounds=3, participation=0.5
    )
    other.run()
    assert torch.equal(models(run), models(other))
    assert not torch.equal(models(run), models(trained(mode, rounds=3, lam=0.0)))
    assert run.counters.bytes_up == run.counters.bytes_down == 0


def _of(part: str, views: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}."): view for name, view in views.items() if name.startswith(f"{part}.")}


def entries(space: ParameterSpace, vector: Tensor) -> list[Tensor]:
    return [vector[entry.offset : entry.end] for entry in space.entries]


def same_but_for_order(space: ParameterSpace, one: Tensor, other: Tensor) -> bool:
    pairs = zip(entries(space, one), entries(space, other), strict=True)
    return all(torch.equal(a.sort().values, b.sort().values) for a, b in pairs) and not torch.equal(one, other)


def test_another_probe_has_the_weights_of_the_initial_one_in_another_order() -> None:
    run = simulation(FedReCo(probe="other"), module=small())
    space, w0 = run.task.space, run.task.w0
    assert same_but_for_order(space, space.join(run.server.u_0, space.head(w0)), w0)
    again = simulation(FedReCo(probe="other"), module=small())
    assert torch.equal(run.server.u_0, again.server.u_0)
    assert not torch.equal(run.server.u_0, simulation(FedReCo(probe="other"), module=small(), seed=1).server.u_0)


@pytest.mark.parametrize("mode", MODES)
def test_own_initialisations_are_drawn_once_by_name_and_differ(mode: str) -> None:
    run = trained(mode, rounds=3, initialisation="own", lr=1e-30)  # so small a rate moves nothing
    begun = models(run)
    for one in range(4):
        assert same_but_for_order(run.task.space, begun[one], run.task.w0)
        assert not any(torch.equal(begun[one], begun[other]) for other in range(one))
    assert torch.equal(begun, models(trained(mode, rounds=1, initialisation="own", lr=1e-30)))


def test_an_epoch_of_fully_reduced_gradients_has_the_mean_of_the_whole_objective() -> None:
    run = simulation(FedReCo(batch=6), classification(4), small())
    work = ThreadTrainer(run.task, run.task.replica(), run.federation, run.algorithm, 0, 1, 3, "batches")  # 18 samples
    rng = torch.Generator().manual_seed(0)
    v, anchor, probe = (run.task.w0 + 0.3 * torch.randn(run.task.w0.shape, generator=rng).double() for _ in range(3))
    term = Discord(probe=probe, given=State(weight=torch.ones(1).double()), anchored="objective")
    there, here = (work.full_gradient(w) + work.term_gradient(term, w) for w in (anchor, v))
    at, found = work.open(v, "all"), []
    for batch, _ in work.batches(1, None, 0, None, term):
        correction = there - work._gradient_at_anchor(anchor, at, batch, "all", term)
        found.append(work.gradient(at, batch, "all", term) + correction)
    assert len(found) == 3
    torch.testing.assert_close(torch.stack(found).mean(0), here, rtol=1e-10, atol=1e-12)


def noisy() -> Federation:
    """Two clients of 16 samples whose targets are noise, so that gradients differ between samples at every optimum."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 16, 3)), rng.normal(size=(2, 16, 1))
    return from_clients([{"train": (x[i], y[i]), "test": (x[i], y[i])} for i in range(2)])


def tiny() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BodyAndHead(nn.Sequential(nn.Linear(3, 1), nn.Tanh()), nn.Linear(1, 1))


def squared_norms(run: Simulation) -> list[float]:
    """Return Γ2 and Γ3 of the theory: mean squared norms of the clients' gradients in extractor and head."""
    found = []
    for who in range(len(run.federation)):
        work = ThreadTrainer(run.task, run.task.replica(), run.federation, run.algorithm, 0, 1, who, "batches")
        w, down = run.store.get(who).w, run.algorithm.broadcast(run.server, who)
        pull = Discord(
            probe=run.task.space.join(down.u_0, run.task.space.head(w)),
            given=State(weight=torch.full((1,), run.algorithm.lam / 2).double()),
        )
        g = work.full_gradient(w) + work.term_gradient(pull, w)
        found.append([float(run.task.space.body(g).square().sum()), float(run.task.space.head(g).square().sum())])
    return [float(value) for value in np.mean(found, axis=0)]


@pytest.mark.slow
def test_with_full_variance_reduction_gradients_fall_at_the_rate_of_1_over_t_where_those_of_sgd_stay() -> None:
    """With constant rates: T times Γ falls, which a rate of 1/T allows; SGD never leaves its noise."""
    found: dict[str, list[float]] = {}
    for reduction in ("none", "full"):
        algorithm = FedReCo(lam=0.2, lr=0.1, server_lr=0.1, batch=2, variance_reduction=reduction)
        options = {"loss": "squared", "mode": "stacked", "participation": 1.0, "evaluate_every": 10**6}
        run = simulation(algorithm, noisy(), tiny(), rounds=10**6, **options)
        for round in range(1, 121):
            assert run.advance()
            if round in (10, 30, 60, 120):
                found.setdefault(reduction, []).append(round * sum(squared_norms(run)))
    assert found["full"] == sorted(found["full"], reverse=True)
    assert found["full"][-1] < found["full"][0] / 2
    assert found["none"][-1] > 50 * found["full"][-1]
