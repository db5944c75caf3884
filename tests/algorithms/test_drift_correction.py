"""SCAFFOLD, FedDyn and FedNova: what holds in every round, whoever takes part."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.algorithms import FedADMM, FedAvg, FedDyn, FedNova, Scaffold
from equipoise.algorithms.base import Algorithm
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.reducers import Mean
from equipoise.state import RoundUploads, State, Upload
from tests.support.problems import FULL, LeastSquares, linear_module, simulation

EQUAL = UploadSettings(reducer=Mean())
"""Every client counts once."""


def rounds(p: LeastSquares, algorithm: Algorithm, count: int, **options: Any) -> Iterator[Simulation]:
    """The run before the first round, and after each of `count` rounds."""
    options = {"participation": 1.0, "evaluate_every": 10**6, "mode": "stacked", **options}
    run = simulation(algorithm, p.federation(), linear_module(p.features), loss="squared", rounds=count + 1, **options)
    yield run
    for _ in range(count):
        run.advance()
        yield run
    run.close()


def last(p: LeastSquares, algorithm: Algorithm, count: int, **options: Any) -> Simulation:
    return list(rounds(p, algorithm, count, **options))[-1]


def of_all(run: Simulation, field: str) -> torch.Tensor:
    return torch.stack([run.store.get(i)[field] for i in range(4)])


# SCAFFOLD


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_first_round_of_scaffold_is_fedavgs_with_equal_weights(option: str, problem: LeastSquares) -> None:
    settings = {"lr": 0.05, "batch": 5, "epochs": 2}
    scaffold = last(problem, Scaffold(option=option, **settings), 1)
    fedavg = last(problem, FedAvg(**settings), 1, uploads=EQUAL)
    torch.testing.assert_close(scaffold.server.x, fedavg.server.w, rtol=1e-12, atol=1e-14)


def test_with_one_full_step_scaffold_is_gradient_descent_on_the_mean_of_losses(problem: LeastSquares) -> None:
    lr = 0.3 / problem.smoothness()
    run = last(problem, Scaffold(lr=lr, batch=FULL), 5)
    x = np.zeros(problem.features)
    for _ in range(5):
        x -= lr * np.mean([problem.hessian(i) @ x - problem.right(i) for i in range(4)], axis=0)
    np.testing.assert_allclose(run.server.x.numpy(), x, rtol=1e-11)


def test_option_ii_is_the_mean_of_the_gradients_that_were_met(problem: LeastSquares) -> None:
    lr, K, p = 0.4 / problem.smoothness(), 3, problem
    run = rounds(p, Scaffold(lr=lr, batch=FULL, steps=K), 3)
    for before in run:
        x, c, kept = before.server.x.numpy(), before.server.c.numpy(), of_all(before, "c").numpy()
        after = next(run, None)
        if after is None:
            break
        for i in range(p.clients):
            y, met = x, []
            for _ in range(K):
                met.append(p.hessian(i) @ y - p.right(i))
                y = y - lr * (met[-1] - kept[i] + c)
            np.testing.assert_allclose(after.store.get(i).c.numpy(), np.mean(met, axis=0), rtol=1e-9, atol=1e-12)


def test_option_i_is_the_gradient_at_the_received_model(problem: LeastSquares) -> None:
    run = rounds(problem, Scaffold(lr=0.05, batch=4, epochs=2, option="I", momentum=0.5), 2)
    next(run)
    x = next(run).server.x.numpy()
    found = of_all(next(run), "c").numpy()
    np.testing.assert_allclose(found, [problem.hessian(i) @ x - problem.right(i) for i in range(4)], rtol=1e-9)


def test_scaffolds_c_is_the_mean_over_all_clients_whoever_takes_part(problem: LeastSquares) -> None:
    for run in rounds(problem, Scaffold(lr=0.03, batch=5, epochs=2, server_lr=0.7), 4, participation=2):
        torch.testing.assert_close(run.server.c, of_all(run, "c").mean(0), rtol=1e-10, atol=1e-14)


def test_means_over_clients_stay_so_when_one_joins_later() -> None:
    """Client 3 joins three others, whose states add up to three times the server's mean."""
    one = torch.ones(2).double()
    mean = {"x": 0 * one, "c": one, "clients": torch.tensor([3.0]).double()}
    after = Scaffold().aggregate(State(mean), uploads(3, x=one, c=4 * one), lambda u: u.mean())
    torch.testing.assert_close(after.c, (3 * one + 4 * one) / 4)
    assert after.clients == 4
    before = State(theta=0 * one, gamma=0 * one, h=one, clients=mean["clients"])
    after = FedDyn(alpha=2.0).aggregate(before, uploads(3, theta=one), lambda u: u.mean())
    torch.testing.assert_close(after.h, (3 * one - 2 * one) / 4)


def uploads(who: int, **message: torch.Tensor) -> RoundUploads:
    return RoundUploads((who,), (Upload(State(message)),))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": "adam"}, r"optimizer = 'adam' is not possible with Scaffold.*use 'sgd'"),
        ({"momentum": 0.9}, r"momentum = 0.9 is not possible with Scaffold, which finds the mean gradient"),
        ({"clip": 1.0}, r"clip = 1.0 is not possible with Scaffold"),
    ],
)
def test_scaffold_refuses_steps_whose_mean_gradient_it_cannot_know(settings: dict, sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence):
        Scaffold(**settings)
    if "optimizer" not in settings:
        Scaffold(option="I", **settings)


# FedDyn


def test_feddyns_h_is_the_mean_over_all_clients_whoever_takes_part(problem: LeastSquares) -> None:
    for run in rounds(problem, FedDyn(alpha=0.3, lr=0.03, batch=5, epochs=2), 4, participation=2):
        torch.testing.assert_close(run.server.h, of_all(run, "g").mean(0), rtol=1e-10, atol=1e-14)


def test_with_all_clients_feddyn_is_fedadmm(problem: LeastSquares) -> None:
    alpha, settings = 0.4, {"lr": 0.05, "batch": 5, "epochs": 2}
    dyn = rounds(problem, FedDyn(alpha=alpha, **settings), 4)
    admm = rounds(problem, FedADMM(rho=alpha / 4, begin="global", **settings), 4)
    for ours, theirs in zip(dyn, admm, strict=True):
        torch.testing.assert_close(ours.server.theta, theirs.server.w, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(of_all(ours, "g"), -4 * of_all(theirs, "pi"), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.0, 1e-6])
def test_feddyns_updates_pile_up(alpha: float, problem: LeastSquares) -> None:
    """theta moves by the mean update of the round, and by those of all rounds so far as often as clients took part."""
    run = rounds(problem, FedDyn(alpha=alpha, lr=0.02, batch=FULL), 4, participation=2)
    theta, piled = next(run).server.theta, torch.zeros(3).double()
    for after in run:
        delta = after.server.gamma - theta
        piled = piled + 2 / 4 * delta
        torch.testing.assert_close(after.server.theta, theta + delta + piled, rtol=1e-8, atol=1e-10)
        theta = after.server.theta


def test_with_all_clients_feddyns_first_move_is_twice_the_mean_update(problem: LeastSquares) -> None:
    run = last(problem, FedDyn(lr=0.02, batch=5), 1)
    torch.testing.assert_close(run.server.theta, 2 * run.server.gamma)  # from zero


def test_feddyns_global_model_is_the_mean_or_what_is_sent(problem: LeastSquares) -> None:
    for predict, field in (("mean", "gamma"), ("sent", "theta")):
        run = last(problem, FedDyn(lr=0.02, batch=5, predict=predict), 1)
        assert run.algorithm.global_model(run.server) is run.server[field]


# FedNova


def test_with_equal_steps_fednova_is_fedavg(problem: LeastSquares) -> None:
    settings = {"lr": 0.05, "batch": 5, "steps": 3}
    nova, fedavg = last(problem, FedNova(**settings), 3), last(problem, FedAvg(**settings), 3)
    torch.testing.assert_close(nova.server.x, fedavg.server.w, rtol=1e-11, atol=1e-13)


def test_with_as_many_steps_as_samples_fednova_weighs_updates_equally(problem: LeastSquares) -> None:
    nova = last(problem, FedNova(lr=0.01, batch=1), 1)
    fedavg = last(problem, FedAvg(lr=0.01, batch=1), 1, uploads=EQUAL)
    n = np.array([len(x) for x in problem.x])
    stretched = 4 * (n**2).sum() / n.sum() ** 2  # tau / K_i p_i, which is the same for all, times 4 of the mean
    torch.testing.assert_close(nova.server.x, stretched * fedavg.server.w, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.7}, {"mu": 0.9}])
def test_fednovas_norm_is_what_the_recursion_gives(settings: dict) -> None:
    eta, nova = 0.3, FedNova(**settings)
    for K in (1, 2, 7):
        s = b = 0.0
        for _ in range(K):
            b = nova.momentum * b + 1
            s = s * (1 - eta * nova.mu) + b
        assert float(nova._norm(torch.tensor([float(K)]).double(), eta)) == pytest.approx(s, rel=1e-12)


def test_with_a_constant_gradient_fednovas_update_is_that_gradient() -> None:
    """With momentum or a proximal term, d is what one step of plain SGD does where the loss is a plane."""

    class Plane:
        size = lr = torch.tensor([0.1]).double()
        local_steps = torch.tensor([6.0]).double()

        def __init__(self, momentum: float):
            self.lr, self.momentum = 0.1, momentum

        def descend(self, start: torch.Tensor, pull: Any) -> torch.Tensor:
            w, b = start, torch.zeros_like(start)
            for _ in range(6):
                b = self.momentum * b + torch.tensor([1.0, -2.0]).double()
                w = w - self.lr * (b + (0 if pull is None else pull(w)))
            return w

    for settings in ({}, {"momentum": 0.6}, {"mu": 0.8}):
        algorithm = FedNova(lr=0.1, **settings)
        x = torch.tensor([0.3, 0.4]).double()
        _, upload = algorithm.local_update(State(), State(x=x), Plane(algorithm.momentum))  # type: ignore[arg-type]
        torch.testing.assert_close(upload.message.d, torch.tensor([-0.1, 0.2]).double())


def test_fednova_refuses_what_it_has_no_formula_for() -> None:
    for settings in ({"momentum": 0.5, "mu": 0.1}, {"momentum": 0.5, "nesterov": True}):
        with pytest.raises(EquipoiseError, match="not possible with FedNova, which has no formula"):
            FedNova(**settings)
    with pytest.raises(EquipoiseError, match="optimizer = 'adamw' is not possible with FedNova"):
        FedNova(optimizer="adamw")
