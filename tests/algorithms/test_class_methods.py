"""FedProto, MOON and FedRoD: what they add to the loss, and what they predict with."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from equipoise.algorithms import FedAvg, FedProto, FedRoD, Moon
from equipoise.algorithms.moon import Contrast
from equipoise.api import Result
from equipoise.data.federation import Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead
from equipoise.state import State
from tests.support.problems import FULL, LeastSquares, classification, simulation, small_mlp

COMMON: dict[str, Any] = {"lr": 0.05, "epochs": 2, "batch": 4}


def finished(algorithm: Any, *given: Any, **options: Any) -> Simulation:
    run = simulation(algorithm, *given, **{"rounds": 2, "participation": 1.0, **options})
    run.run()
    return run


def unequal() -> Federation:
    """Two clients; the second one lacks the third class."""
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(len(y), 5)), np.array(y)) for y in ([0, 1, 2, 2, 2, 0], [0, 1, 0, 0])]
    return from_clients([{"train": part, "test": part} for part in parts])


def samples(federation: Federation, who: int) -> tuple[Tensor, Tensor]:
    return federation.gather(torch.from_numpy(federation.train[who]))


def gradient_step(run: Simulation, w: Tensor, objective: Any, lr: float) -> Tensor:
    """Return w after a step on what `objective` makes of features and outputs, by autograd on the module itself."""
    module, space = run.task.module, run.task.space
    w = w.detach().clone().requires_grad_()

    def call(v: Tensor) -> tuple[Any, Any]:
        parameters = space.views(v)
        return (
            lambda x: functional_call(module.body, {k[5:]: t for k, t in parameters.items() if k[:4] == "body"}, (x,)),
            lambda x: functional_call(module, parameters, (x,)),
        )

    (g,) = torch.autograd.grad(objective(call, w), w)
    return w.detach() - lr * g


# FedProto


@pytest.mark.parametrize("weigh", ["samples", "clients"])
def test_prototypes_are_means_of_the_features_of_a_class(weigh: str) -> None:
    run = finished(FedProto(**COMMON, weigh=weigh), rounds=1)
    parts: dict[int, list[Tensor]] = {}
    for i in range(6):
        x, y = samples(run.federation, i)
        h = run.task.space.module(run.task.module, run.store.get(i).w).body(x)
        for c in y.unique().tolist():
            parts.setdefault(c, []).append(h[y == c].detach())
    for c, found in parts.items():
        mean = torch.cat(found).mean(0) if weigh == "samples" else torch.stack([h.mean(0) for h in found]).mean(0)
        torch.testing.assert_close(run.server.c[c], mean, rtol=1e-9, atol=1e-12)
    assert run.server.known.tolist() == [1.0, 1.0, 1.0]


def test_the_linear_head_finds_the_nearest_prototype() -> None:
    run = finished(FedProto(**COMMON))
    for i in range(6):
        x = torch.from_numpy(np.random.default_rng(i).normal(size=(50, 5)))
        h = run.task.space.module(run.task.module, run.store.get(i).w).body(x)
        nearest = torch.cdist(h, run.server.c).argmin(1)
        assert torch.equal(Result(run).personal(i)(x).argmax(1), nearest)
        assert len(nearest.unique()) > 1


def test_a_class_that_nobody_has_keeps_its_prototype_and_one_that_nobody_had_is_not_predicted() -> None:
    rng = np.random.default_rng(0)
    labels = ([0, 0, 1, 1], [1, 1, 1, 1])
    parts = [{"train": (x := rng.normal(size=(4, 5)), np.array(y)), "test": (x, np.array(y))} for y in labels]
    run = simulation(FedProto(**COMMON), from_clients(parts), rounds=9, participation=1)
    before, kept = run.server, 0
    for round in range(1, 9):
        run.advance()
        if run.sample(round) == [1] and before.known[0]:
            assert torch.equal(run.server.c[0], before.c[0])
            kept += 1
        before = run.server
    run.close()
    assert kept
    assert run.server.known.tolist() == [1.0, 1.0, 0.0]
    x = torch.from_numpy(rng.normal(size=(200, 5)) * 9)
    assert not (Result(run).personal(0)(x).argmax(1) == 2).any()


def test_a_strong_pull_collapses_the_features_of_a_class() -> None:
    """A linear body with as many inputs as samples can map every sample anywhere."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 5)), np.array([0, 0, 1, 1])
    module = BodyAndHead(nn.Linear(5, 4), nn.Linear(4, 2))
    spreads = []
    for lam in (0.0, 1e4):
        algorithm = FedProto(lr=1e-5 if lam else 0.1, lam=lam, batch=FULL, steps=400)
        run = finished(algorithm, from_clients([{"train": (x, y), "test": (x, y)}]), module, rounds=3)
        h = run.task.space.module(run.task.module, run.store.get(0).w).body(torch.from_numpy(x)).detach()
        spreads.append(float(torch.cat([h[:2] - h[:2].mean(0), h[2:] - h[2:].mean(0)]).norm()))
    assert spreads[1] < 1e-2 * spreads[0]


def test_fedproto_needs_a_head_that_can_hold_prototypes() -> None:
    without_bias = BodyAndHead(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 3, bias=False))
    with pytest.raises(EquipoiseError, match=r"the model's head has none; .* algorithm.predict = 'head'"):
        simulation(FedProto(**COMMON), None, without_bias)
    run = finished(FedProto(**COMMON, predict="head"), None, without_bias)
    assert torch.equal(Result(run).personal_vector(0).vector, run.store.get(0).w)


# MOON


def test_the_first_round_of_moon_is_fedavgs() -> None:
    moon, fedavg = (finished(a, rounds=1) for a in (Moon(mu=5.0, **COMMON), FedAvg(**COMMON)))
    torch.testing.assert_close(moon.server.w, fedavg.server.w, rtol=1e-10, atol=1e-12)


def test_a_client_alone_has_nothing_to_contrast() -> None:
    """The global model is its own previous one."""
    alone = from_clients([{"train": (t := samples(classification(), 4)), "test": t}])
    moon, fedavg = (finished(a, alone, rounds=3) for a in (Moon(mu=5.0, **COMMON), FedAvg(**COMMON)))
    torch.testing.assert_close(moon.server.w, fedavg.server.w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_moons_step_is_that_of_the_loss_as_printed(mode: str) -> None:
    mu, tau, lr = 2.0, 0.7, 0.1
    run = simulation(Moon(mu=mu, tau=tau, lr=lr, batch=FULL), mode=mode, participation=1.0)
    run.advance()
    w, w_prev, (x, y) = run.server.w, run.store.get(4).w_prev, samples(run.federation, 4)
    assert not torch.equal(w, w_prev)

    def objective(call: Any, v: Tensor) -> Tensor:
        z, z_glob, z_prev = (call(at)[0](x) for at in (v, w, w_prev))
        near, far = (F.cosine_similarity(z, other).div(tau).exp() for other in (z_glob, z_prev))
        return F.cross_entropy(call(v)[1](x), y) - mu * (near / (near + far)).log().mean()

    expected = gradient_step(run, w, objective, lr)
    run.advance()
    run.close()
    torch.testing.assert_close(run.store.get(4).w_prev, expected, rtol=1e-9, atol=1e-12)


def test_the_contrasts_gradient_and_that_it_does_not_overflow() -> None:
    generator = torch.Generator().manual_seed(0)
    z, one, two = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(3))

    def contrast(z: Tensor, tau: float) -> Tensor:
        given = State(mu=torch.tensor([2.0]), tau=torch.tensor([tau]))
        return Contrast.each((z,), (one, two), torch.zeros(3), given)

    assert torch.autograd.gradcheck(lambda z: contrast(z, 0.5), z.requires_grad_())
    assert contrast(z, 1e-6).isfinite().all()
    assert torch.equal(
        Contrast.each((z,), (one, one), torch.zeros(3), State(mu=torch.ones(1), tau=torch.ones(1))),
        torch.full((3,), 2.0).double().log(),
    )


# FedRoD


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_fedrods_model_takes_a_step_on_the_balanced_loss(mode: str) -> None:
    gamma, lr = 0.8, 0.1
    run = simulation(FedRoD(gamma=gamma, lr=lr, batch=FULL), unequal(), mode=mode, participation=1.0)
    sent: list[Any] = []
    aggregate = run.aggregate
    run.aggregate = lambda round, uploads, names: sent.extend(uploads.uploads) or aggregate(round, uploads, names)
    run.advance()
    run.close()
    for i in range(2):
        x, y = samples(run.federation, i)
        prior = gamma * torch.bincount(y, minlength=3).double().log()  # minus infinity for a class it does not have

        def balanced(call: Any, v: Tensor, x: Tensor = x, y: Tensor = y, prior: Tensor = prior) -> Tensor:
            return F.cross_entropy(call(v)[1](x) + prior, y)

        expected = gradient_step(run, run.start.w0, balanced, lr)
        torch.testing.assert_close(sent[i].message.w, expected, rtol=1e-9, atol=1e-12)


def test_fedrods_personal_head_takes_a_step_on_the_ordinary_loss() -> None:
    run = simulation(FedRoD(gamma=0.0, lr=0.1, personal_lr=0.2, batch=FULL), participation=1.0)
    run.advance()
    run.close()
    x, y = samples(run.federation, 4)
    w = gradient_step(run, run.start.w0, lambda call, v: F.cross_entropy(call(v)[1](x), y), 0.1)
    both = gradient_step(run, w, lambda call, v: F.cross_entropy(call(v)[1](x), y), 0.2)
    head = run.task.space.head
    torch.testing.assert_close(run.store.get(4).phi, head(both) - head(w), rtol=1e-9, atol=1e-12)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 5)))
    personal, generic = Result(run).personal(4), Result(run).global_model()
    phi = run.task.space.module(
        run.task.module, run.task.space.join(run.task.space.body(run.server.w), run.store.get(4).phi)
    )
    torch.testing.assert_close(personal(x), generic(x) + phi(x), rtol=1e-9, atol=1e-12)


def test_without_a_rate_fedrods_personal_models_are_the_global_one() -> None:
    run = finished(FedRoD(**COMMON, personal_lr=0.0))
    assert all(torch.equal(Result(run).personal_vector(i).vector, run.server.w) for i in range(6))


def test_with_equal_numbers_of_all_classes_nothing_is_balanced() -> None:
    x = np.random.default_rng(0).normal(size=(2, 9, 5))
    y = np.arange(9) % 3
    equal = from_clients([{"train": (each, y), "test": (each, y)} for each in x])
    balanced, plain = (finished(FedRoD(**COMMON, gamma=gamma), equal) for gamma in (1.0, 0.0))
    torch.testing.assert_close(balanced.server.w, plain.server.w, rtol=1e-10, atol=1e-12)


def test_fedrod_needs_cross_entropy(problem: LeastSquares) -> None:
    with pytest.raises(EquipoiseError, match="FedRoD works class by class"):
        simulation(FedRoD(), problem.federation(), small_mlp(features=3, outputs=1), loss="squared")
    with pytest.raises(EquipoiseError, match="FedRoD changes the cross-entropy"):
        simulation(FedRoD(), loss=lambda output, y: F.nll_loss(output.log_softmax(1), y))
