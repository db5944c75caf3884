"""APFL and Per-FedAvg: what their steps are, of which each takes gradients at several points."""

from typing import Any

import numpy as np
import pytest
import torch

from equipoise.algorithms import APFL, FedAvg, Local, PerFedAvg
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.reducers import Mean
from equipoise.runs.result import Result
from tests.support.problems import FULL, LeastSquares, least_squares, simulation

COMMON: dict[str, Any] = {"lr": 0.05, "epochs": 2, "batch": 4}
EQUAL = UploadSettings(reducer=Mean())
"""Every client counts once."""


def finished(algorithm: Any, **options: Any) -> Simulation:
    run = simulation(algorithm, **{"rounds": 3, **options})
    run.run()
    return run


def gradient(p: LeastSquares, i: int, v: np.ndarray) -> np.ndarray:
    return p.hessian(i) @ v - p.right(i)


# APFL


def test_with_alpha_zero_apfl_is_fedavg_and_personal_models_are_the_global_one() -> None:
    apfl, fedavg = finished(APFL(alpha=0.0, **COMMON)), finished(FedAvg(**COMMON))
    assert torch.equal(apfl.server.w, fedavg.server.w)
    result = Result(apfl)
    for i in range(6):
        assert torch.equal(apfl.store.get(i).v, apfl.task.w0)
        assert torch.equal(result.personal_vector(i).vector, apfl.server.w)


def test_with_alpha_one_apfl_is_local_beside_fedavg() -> None:
    apfl, local = finished(APFL(alpha=1.0, **COMMON)), finished(Local(**COMMON))
    assert torch.equal(apfl.server.w, finished(FedAvg(**COMMON)).server.w)
    result = Result(apfl)
    for i in range(6):
        assert torch.equal(apfl.store.get(i).v, local.store.get(i).v)
        assert torch.equal(result.personal_vector(i).vector, local.store.get(i).v)


def test_apfl_step_by_step_by_hand(problem: LeastSquares) -> None:
    """Mixtures are made before a step, and alpha moves in the first step of a round only."""
    p, lr, alpha_lr, n = problem, 0.05, 0.3, np.array([len(x) for x in problem.x])
    algorithm = APFL(alpha=0.4, adaptive=True, alpha_lr=alpha_lr, lr=lr, batch=FULL, steps=3)
    run = least_squares(p, algorithm, rounds=3)
    w, v, alpha = np.zeros(3), np.zeros((4, 3)), np.full(4, 0.4)
    for _ in range(3):
        sent = []
        for i in range(4):
            w_i, before = w, alpha[i]
            for step in range(3):
                own, mixed = gradient(p, i, w_i), gradient(p, i, alpha[i] * v[i] + (1 - alpha[i]) * w_i)
                slope, share = (v[i] - w_i) @ mixed, alpha[i]
                if step == 0:
                    alpha[i] = np.clip(alpha[i] - alpha_lr * slope, 0, 1)
                w_i, v[i] = w_i - lr * own, v[i] - lr * share * mixed
            sent.append(w_i)
            assert 0 <= before <= 1
        w = np.average(sent, axis=0, weights=n)
    np.testing.assert_allclose(run.server.w.numpy(), w, rtol=1e-10)
    for i in range(4):
        np.testing.assert_allclose(run.store.get(i).v.numpy(), v[i], rtol=1e-10)
        np.testing.assert_allclose(run.store.get(i).alpha.numpy(), alpha[i : i + 1], rtol=1e-10)
    assert len(set(alpha.round(6))) > 1


def test_alpha_stays_between_zero_and_one(problem: LeastSquares) -> None:
    run = least_squares(problem, APFL(adaptive=True, alpha_lr=1e4, lr=0.05, batch=FULL), rounds=4)
    assert {float(run.store.get(i).alpha) for i in range(4)} <= {0.0, 1.0}


def test_a_newcomers_mixture_is_trained_with_the_global_model_as_it_is(problem: LeastSquares) -> None:
    class Data:
        def descend(self, start: torch.Tensor, *, lr: torch.Tensor, epochs: int) -> torch.Tensor:
            """Full steps on the first client's loss."""
            for _ in range(epochs):
                start = start - lr * torch.from_numpy(gradient(problem, 0, start.numpy()))
            return start

    algorithm = APFL(alpha=0.6, lr=0.1, adapt_epochs=4)
    w = torch.tensor([0.5, -0.2, 1.0]).double()
    client = algorithm.init_client(simulation(algorithm).start)
    found = algorithm.adapt(client, type("Down", (), {"w": w})(), Data())  # type: ignore[arg-type]
    v = w.numpy()
    for _ in range(4):
        v = v - 0.1 * 0.6 * gradient(problem, 0, 0.6 * v + 0.4 * w.numpy())
    np.testing.assert_allclose(found.numpy(), 0.6 * v + 0.4 * w.numpy(), rtol=1e-12)


# Per-FedAvg


def test_without_an_inner_step_per_fedavg_is_fedavg_with_equal_weights() -> None:
    for version in ("FO", "HF"):
        per = finished(PerFedAvg(alpha=0.0, version=version, **COMMON))
        avg = finished(FedAvg(**COMMON), uploads=EQUAL)
        torch.testing.assert_close(per.server.w, avg.server.w, rtol=1e-10, atol=1e-13)
        assert torch.equal(Result(per).personal_vector(3).vector, per.server.w)


@pytest.mark.parametrize("delta", [1e-3, 1.0])
def test_steps_of_per_fedavg_are_the_papers(delta: float, problem: LeastSquares) -> None:
    """On quadratic losses the difference of gradients is the Hessian times q, whatever delta is."""
    p, alpha, beta, eye = problem, 0.07, 0.05, np.eye(3)
    for version, power in (("FO", 1), ("HF", 2)):
        settings = {"version": version, "alpha": alpha, "delta": delta, "lr": beta, "batch": FULL, "steps": 2}
        run = least_squares(p, PerFedAvg(**settings), rounds=3)
        w = np.zeros(3)
        for _ in range(3):
            sent = []
            for i in range(4):
                w_i = w
                for _ in range(2):
                    q = gradient(p, i, w_i - alpha * gradient(p, i, w_i))
                    w_i = w_i - beta * np.linalg.matrix_power(eye - alpha * p.hessian(i), power - 1) @ q
                sent.append(w_i)
            w = np.mean(sent, axis=0)
        np.testing.assert_allclose(run.server.w.numpy(), w, rtol=1e-9)


def test_personal_models_of_per_fedavg_are_steps_of_the_inner_rate_away(problem: LeastSquares) -> None:
    for steps in (1, 3):
        algorithm = PerFedAvg(alpha=0.07, personal_steps=steps, lr=0.05, batch=FULL)
        run = least_squares(problem, algorithm, rounds=2)
        for i in range(4):
            v = run.server.w.numpy()
            for _ in range(steps):
                v = v - 0.07 * gradient(problem, i, v)
            np.testing.assert_allclose(Result(run).personal_vector(i).vector.numpy(), v, rtol=1e-10)


def test_each_gradient_of_per_fedavg_is_counted() -> None:
    one = finished(FedAvg(**COMMON)).counters.gradient_samples
    for version, gradients in (("FO", 2), ("HF", 4)):
        run = finished(PerFedAvg(version=version, **COMMON), evaluate_every=10**6)
        made = sum(len(run.federation.train[i]) for i in range(6))  # the last evaluation's personal models, at most
        assert gradients * one <= run.counters.gradient_samples <= gradients * one + made


@pytest.mark.parametrize("method", [APFL, PerFedAvg])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": "adam"}, "algorithm.optimizer = 'adam' is not possible with .*; use 'sgd'"),
        ({"momentum": 0.9}, "algorithm.momentum = 0.9 is not possible with"),
        ({"clip": 1.0}, "algorithm.clip = 1.0 is not possible with"),
    ],
)
def test_other_steps_than_those_of_plain_sgd_are_refused(method: type, settings: dict, sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence):
        method(**settings)
