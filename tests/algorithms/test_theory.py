"""Least-squares clients with known optima: every method reaches what its theory says."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.algorithms import (
    ALGORITHMS,
    APFL,
    CFL,
    Ditto,
    FeatureDecay,
    FedADMM,
    FedALA,
    FedAMP,
    FedAS,
    FedAvg,
    FedAvgFT,
    FedBABU,
    FedBN,
    FedCAC,
    FedCP,
    FedCR,
    FedDBE,
    FedDyn,
    FeDEQ,
    FedFomo,
    FedNova,
    FedPAC,
    FedPer,
    FedProto,
    FedProx,
    FedProxFT,
    FedReCo,
    FedRep,
    FedRoD,
    Flame,
    FlameLpProj,
    FlDEQ,
    KnnPer,
    Learn2pFed,
    LGFedAvg,
    Local,
    LpProj,
    Moon,
    PerFedAvg,
    PFedMe,
    Scaffold,
    SharedLeastSquares,
)
from equipoise.algorithms.afl import AFL
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import LocalData
from equipoise.algorithms.q_ffl import QFFL
from equipoise.algorithms.term import TERM
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import from_clients
from equipoise.engine.simulation import Simulation
from equipoise.reducers import Mean
from equipoise.state import State, Upload
from tests.algorithms import test_gpfl, test_pfedfda
from tests.support.marks import slow_except
from tests.support.problems import FULL, LeastSquares, classification, least_squares, simulation

LONG = 100
"""Rounds or steps that are enough for limits: 80 gradient steps leave a billionth of the error on these problems."""


def personal(run: Simulation, who: int) -> np.ndarray:
    return run.store.get(who)["v"].numpy()


def local_reaches_each_clients_least_squares(p: LeastSquares) -> None:
    run = least_squares(p, Local(lr=1 / p.smoothness(), batch=FULL), rounds=LONG)
    for i in range(p.clients):
        np.testing.assert_allclose(personal(run, i), p.local(i), rtol=1e-8)


def fedavg_with_one_full_step_is_gradient_descent_on_the_pooled_loss(p: LeastSquares) -> None:
    lr = 0.3 / p.smoothness()
    x, y = np.concatenate(p.x), np.concatenate(p.y)
    w = np.zeros(p.features)
    for rounds in (1, 2, 7):
        w = np.zeros(p.features)
        for _ in range(rounds):
            w -= lr * 2 * x.T @ (x @ w - y) / len(x)
        run = least_squares(p, FedAvg(lr=lr, batch=FULL), rounds=rounds)
        np.testing.assert_allclose(run.server.w.numpy(), w, rtol=1e-12)
    run = least_squares(p, FedAvg(lr=1 / p.smoothness(), batch=FULL), rounds=LONG)
    np.testing.assert_allclose(run.server.w.numpy(), p.pooled(), rtol=1e-8)


def _fine_tuned(p: LeastSquares, algorithm: FedAvgFT | FedProxFT) -> None:
    run = least_squares(p, algorithm, rounds=1)
    for i in range(p.clients):
        np.testing.assert_allclose(_personal_vector(run, i), p.local(i), rtol=1e-8)


def _personal_vector(run: Simulation, who: int) -> np.ndarray:
    from equipoise.runs.result import Result

    return Result(run).personal_vector(who).vector.numpy()


def fine_tuning_for_long_reaches_each_clients_least_squares(p: LeastSquares) -> None:
    _fine_tuned(p, FedAvgFT(lr=1 / p.smoothness(), batch=FULL, finetune_epochs=LONG))


def fine_tuning_has_no_proximal_term(p: LeastSquares) -> None:
    _fine_tuned(p, FedProxFT(lr=1 / p.smoothness(), batch=FULL, finetune_epochs=LONG, mu=5.0))


def fedprox_solves_its_proximal_problem(p: LeastSquares) -> None:
    mu = 0.7
    run = least_squares(p, FedProx(lr=1 / (p.smoothness() + mu), batch=FULL, steps=400, mu=mu), rounds=2)
    w = np.zeros(p.features)
    sizes = np.array([len(x) for x in p.x])
    for _ in range(2):  # each round every client solves min f_i(v) + mu/2 |v - w|^2 to the end
        solved = [
            np.linalg.solve(p.hessian(i) + mu * np.eye(p.features), p.right(i) + mu * w) for i in range(p.clients)
        ]
        w = np.average(solved, axis=0, weights=sizes)
    np.testing.assert_allclose(run.server.w.numpy(), w, rtol=1e-9)


def ditto_has_the_pooled_model_and_the_pulled_ones(p: LeastSquares) -> None:
    lam = 0.9
    algorithm = Ditto(lr=1 / p.smoothness(), batch=FULL, lam=lam, personal_lr=1 / (p.smoothness() + lam))
    run = least_squares(p, algorithm, rounds=LONG)
    w = p.pooled()
    np.testing.assert_allclose(run.server.w.numpy(), w, rtol=1e-8)
    for i in range(p.clients):
        v = np.linalg.solve(p.hessian(i) + lam * np.eye(p.features), p.right(i) + lam * w)
        np.testing.assert_allclose(personal(run, i), v, rtol=1e-8)


def fedper_with_nothing_but_a_head_is_local(p: LeastSquares) -> None:
    run = least_squares(p, FedPer(lr=1 / p.smoothness(), batch=FULL), rounds=LONG)
    for i in range(p.clients):
        np.testing.assert_allclose(run.store.get(i)["w_p"].numpy(), p.local(i), rtol=1e-8)


def fedrep_with_nothing_but_a_head_is_local(p: LeastSquares) -> None:
    run = least_squares(p, FedRep(lr=1 / p.smoothness(), batch=FULL), rounds=LONG)
    for i in range(p.clients):
        np.testing.assert_allclose(run.store.get(i)["h"].numpy(), p.local(i), rtol=1e-8)


def flame_ends_where_its_envelopes_are_smallest(p: LeastSquares) -> None:
    lam, eye = 0.8, np.eye(p.features)
    rate = 1 / (p.smoothness() + lam)
    run = least_squares(p, Flame(lam=lam, rho=3 * lam / p.clients, lr=rate, batch=FULL, steps=20), rounds=LONG)
    w = run.server.w.numpy()
    theta = [run.store.get(i).theta.numpy() for i in range(p.clients)]
    for i in range(p.clients):
        np.testing.assert_allclose((p.hessian(i) + lam * eye) @ theta[i], p.right(i) + lam * w, rtol=1e-7)
    np.testing.assert_allclose(w, np.mean(theta, axis=0), rtol=1e-7)


def pfedme_takes_gradient_steps_on_the_envelopes(p: LeastSquares) -> None:
    lam, eta, eye = 0.8, 0.2, np.eye(p.features)
    rate = 1 / (p.smoothness() + lam)
    algorithm = PFedMe(lam=lam, global_lr=eta, local_rounds=1, inner_steps=0, steps=300, lr=rate, batch=FULL)
    run = least_squares(p, algorithm, rounds=3)
    w = np.zeros(p.features)
    for _ in range(3):  # the gradient of an envelope is lam (w - theta(w))
        solved = [np.linalg.solve(p.hessian(i) + lam * eye, p.right(i) + lam * w) for i in range(p.clients)]
        w = w - eta * lam * (w - np.mean(solved, axis=0))
    np.testing.assert_allclose(run.server.w.numpy(), w, rtol=1e-9)


def fedadmm_ends_where_equal_clients_agree(p: LeastSquares) -> None:
    algorithm = FedADMM(rho=2 / p.clients, lr=1 / (p.smoothness() + 2), batch=FULL, steps=40)
    run = least_squares(p, algorithm, rounds=LONG)
    hessian, right = (sum(f(i) for i in range(p.clients)) for f in (p.hessian, p.right))
    np.testing.assert_allclose(run.server.w.numpy(), np.linalg.solve(hessian, right), rtol=1e-8)


def lp_proj_takes_gradient_steps_in_the_projection(p: LeastSquares) -> None:
    lam, eta = 0.8, 0.2
    rate = 1 / (p.smoothness() + lam)
    algorithm = LpProj(lam=lam, global_lr=eta, d_sub=2, local_rounds=1, inner_steps=0, steps=300, lr=rate, batch=FULL)
    run = least_squares(p, algorithm, rounds=3)
    matrix = algorithm.seen(torch.eye(p.features).double(), 0).T.numpy()
    w = np.zeros(2)
    for _ in range(3):
        solved = [_in_projection(p, i, lam, matrix, w) for i in range(p.clients)]
        w = w - eta * lam * (w - np.mean([matrix @ theta for theta in solved], axis=0))
    np.testing.assert_allclose(run.server.w.numpy(), w, rtol=1e-8)


def flame_in_the_projection_agrees_on_the_projection(p: LeastSquares) -> None:
    lam = 0.8
    rate = 1 / (p.smoothness() + lam)
    algorithm = FlameLpProj(lam=lam, rho=3 * lam / p.clients, d_sub=2, lr=rate, batch=FULL, steps=20)
    run = least_squares(p, algorithm, rounds=LONG)
    matrix = algorithm.seen(torch.eye(p.features).double(), 0).T.numpy()
    w = run.server.w.numpy()
    theta = [run.store.get(i).theta.numpy() for i in range(p.clients)]
    for i in range(p.clients):
        np.testing.assert_allclose(theta[i], _in_projection(p, i, lam, matrix, w), rtol=1e-7)
    np.testing.assert_allclose(w, np.mean([matrix @ t for t in theta], axis=0), rtol=1e-7)


def _in_projection(p: LeastSquares, i: int, lam: float, matrix: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The smallest f_i(theta) + lam/2 ||P theta - w||^2."""
    return np.linalg.solve(p.hessian(i) + lam * matrix.T @ matrix, p.right(i) + lam * matrix.T @ w)


def fedeq_by_dual_averages_ends_where_equal_clients_agree(p: LeastSquares) -> None:
    rho = 1.0
    algorithm = FeDEQ(rho=rho, average="dual", lr=1 / (p.smoothness() + rho), head_epochs=1, epochs=8, batch=FULL)
    run = least_squares(p, algorithm, head=None, rounds=LONG)
    hessian, right = (sum(f(i) for i in range(p.clients)) for f in (p.hessian, p.right))
    np.testing.assert_allclose(run.server.theta.numpy(), np.linalg.solve(hessian, right), rtol=1e-7)


def fl_deq_of_equal_devices_is_gradient_descent_on_the_mean_of_losses(p: LeastSquares) -> None:
    lr = 0.3 / p.smoothness()
    run = least_squares(p, FlDEQ(lr=lr, batch=FULL), rounds=7)
    w = np.zeros(p.features)
    for _ in range(7):
        w -= lr * np.mean([p.hessian(i) @ w - p.right(i) for i in range(p.clients)], axis=0)
    np.testing.assert_allclose(run.server.w.numpy(), w, rtol=1e-12)


def the_nearest_neighbour_of_a_training_sample_is_itself(p: LeastSquares) -> None:
    algorithm = KnnPer(lr=1 / p.smoothness(), batch=FULL, k=(1,), mix=(1.0,))
    run = least_squares(p, algorithm, rounds=LONG)
    np.testing.assert_allclose(run.server.w.numpy(), p.pooled(), rtol=1e-8)  # FedAvg's model
    np.testing.assert_allclose(run.scores.tables()["personal"][:, 2:], 0, atol=1e-14)  # test samples are trained on


def cfl_that_never_splits_is_fedavg(p: LeastSquares) -> None:
    run = least_squares(p, CFL(lr=1 / p.smoothness(), batch=FULL, quiet=1000), rounds=LONG)
    np.testing.assert_allclose(run.server.w[0].numpy(), p.pooled(), rtol=1e-8)
    assert not run.server.group.any()


def learn2pfed_without_ties_reaches_each_clients_least_squares(p: LeastSquares) -> None:
    algorithm = Learn2pFed(cells=50, rho=2.0, eta=2.0, theta=1.0, lam=1e-9, draw=False, learn=(), warm=True)
    run = least_squares(p, algorithm, rounds=6)
    for i in range(p.clients):
        np.testing.assert_allclose(run.store.get(i).x[1, 0, :, 0], p.local(i), rtol=1e-7)


def fedbabu_with_nothing_but_a_head_is_local(p: LeastSquares) -> None:
    _fine_tuned(p, FedBABU(lr=1 / p.smoothness(), batch=FULL, finetune_epochs=LONG))


def fedreco_with_nothing_but_a_head_is_local(p: LeastSquares) -> None:
    """There is nothing to agree on, whatever the pull."""
    run = least_squares(p, FedReCo(lr=1 / p.smoothness(), batch=FULL, lam=5.0), rounds=LONG)
    for i in range(p.clients):
        np.testing.assert_allclose(run.store.get(i).w.numpy(), p.local(i), rtol=1e-8)


def feature_decay_with_nothing_but_a_head_is_local(p: LeastSquares) -> None:
    """There is no representation that could be made small, whatever the penalty."""
    run = least_squares(p, FeatureDecay(lr=1 / p.smoothness(), batch=FULL, lam=5.0), rounds=400)
    for i in range(p.clients):
        np.testing.assert_allclose(run.store.get(i).w.numpy(), p.local(i), rtol=1e-8)


def _equal_clients(algorithm: Algorithm) -> Simulation:
    """Clients with the same samples: each has what it would have alone."""
    x, y = (t.numpy() for t in classification().gather(torch.arange(20)))
    federation = from_clients([{"train": (x, y), "test": (x, y)}] * 3)
    run = simulation(algorithm, federation, rounds=5, participation=1.0)
    run.run()
    return run


def fedpac_of_equal_clients_is_fedrep(p: LeastSquares) -> None:
    """Every head is the mean of the same heads, and nothing is pulled."""
    pac, rep = _equal_clients(FedPAC(lr=0.1, batch=FULL, lam=0.0)), _equal_clients(FedRep(lr=0.1, batch=FULL))
    torch.testing.assert_close(pac.server.theta, rep.server.phi, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(pac.server.phi[1], rep.store.get(1).h, rtol=1e-9, atol=1e-11)


def fedcr_without_pull_is_fedper(p: LeastSquares) -> None:
    cr, per = finished(FedCR(beta=0.0, **COMMON)), finished(FedPer(**COMMON))
    assert torch.equal(cr.server.phi, per.server.w_b)


def least_squares_is_each_clients_and_the_pooled_one(p: LeastSquares) -> None:
    run = least_squares(p, ALGORITHMS["least-squares"](), rounds=1)
    np.testing.assert_allclose(run.server.w, p.pooled(), rtol=1e-10)
    for i in range(p.clients):
        np.testing.assert_allclose(_personal_vector(run, i), p.local(i), rtol=1e-10)


def shared_least_squares_has_no_gradient_left(p: LeastSquares) -> None:
    """Own coefficients are where each client's gradient is zero; shared ones where the sum of all gradients is."""
    run = least_squares(p, SharedLeastSquares(shared=(1,)), rounds=1)
    slopes = [len(p.x[i]) * (p.hessian(i) @ _personal_vector(run, i) - p.right(i)) for i in range(p.clients)]
    np.testing.assert_allclose(np.delete(slopes, 1, axis=1), 0, atol=1e-9)
    np.testing.assert_allclose(np.sum(slopes, axis=0), 0, atol=1e-9)
    assert np.abs(slopes).max() > 0.1


def _equal_optimum(p: LeastSquares) -> np.ndarray:
    """Where the sum of the clients' losses, each counting once, is smallest."""
    return np.linalg.solve(*(sum(f(i) for i in range(p.clients)) for f in (p.hessian, p.right)))


def _share_of_the_way(p: LeastSquares, i: int, lr: float, steps: int) -> np.ndarray:
    """The matrix A by which full steps lead from x to x - A (x - the client's optimum)."""
    eye = np.eye(p.features)
    return eye - np.linalg.matrix_power(eye - lr * p.hessian(i), steps)


def scaffold_ends_where_equal_clients_agree_whoever_takes_part(p: LeastSquares) -> None:
    lr, steps = 0.5 / p.smoothness(), 5
    run = least_squares(p, Scaffold(lr=lr, batch=FULL, steps=steps), rounds=60, participation=0.5)
    x = _equal_optimum(p)
    np.testing.assert_allclose(run.server.x.numpy(), x, atol=1e-6)
    np.testing.assert_allclose(run.server.c.numpy(), 0, atol=1e-6)
    for i in range(p.clients):
        np.testing.assert_allclose(run.store.get(i).c.numpy(), p.hessian(i) @ x - p.right(i), atol=1e-5)
    A = [_share_of_the_way(p, i, lr, steps) for i in range(p.clients)]
    drifted = np.linalg.solve(sum(A), sum(a @ p.local(i) for i, a in enumerate(A)))  # where FedAvg stays
    assert np.abs(drifted - x).max() > 0.01


def feddyn_ends_where_equal_clients_agree(p: LeastSquares) -> None:
    run = least_squares(p, FedDyn(alpha=3.0, lr=1 / (p.smoothness() + 3), batch=FULL, steps=10), rounds=50)
    for found in (run.server.theta, run.server.gamma):
        np.testing.assert_allclose(found.numpy(), _equal_optimum(p), rtol=1e-8)


class _Uneven:
    """A client's data, of which some clients make more steps than others."""

    def __init__(self, data: LocalData, steps: dict[int, int]):
        self.data, self.steps = data, steps.get(int(data.size), 1)
        self.size, self.lr, self.local_steps = data.size, data.lr, torch.full_like(data.size, self.steps)

    def descend(self, start: Tensor, **how: Any) -> Tensor:
        return self.data.descend(start, steps=self.steps, **how)


def fednova_has_the_fixed_point_of_normalised_updates(p: LeastSquares) -> None:
    steps = {len(x): steps for x, steps in zip(p.x, (1, 3, 5, 9), strict=True)}

    class Uneven(FedNova):
        def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
            return super().local_update(client, down, _Uneven(data, steps))  # type: ignore[arg-type]

    def fixed_point(lr: float) -> np.ndarray:
        A = [_share_of_the_way(p, i, lr, k) * n / k for i, (n, k) in enumerate(steps.items())]
        return np.linalg.solve(sum(A), sum(a @ p.local(i) for i, a in enumerate(A)))

    lr = 0.5 / p.smoothness()
    run = least_squares(p, Uneven(lr=lr, batch=FULL), rounds=40, mode="threads")
    np.testing.assert_allclose(run.server.x.numpy(), fixed_point(lr), rtol=1e-6)
    gaps = [np.abs(fixed_point(rate) - p.pooled()).max() for rate in (lr, lr / 1000)]
    assert gaps[1] < gaps[0] / 100  # with small steps it is the pooled optimum


def lg_fedavg_with_nothing_but_a_head_is_fedavg(p: LeastSquares) -> None:
    one, two = (least_squares(p, a(lr=0.05, batch=5, epochs=2), rounds=5) for a in (LGFedAvg, FedAvg))
    assert torch.equal(one.server.w_g, two.server.w)


def fedbn_without_batch_normalisation_is_fedavg(p: LeastSquares) -> None:
    one, two = (least_squares(p, a(lr=0.05, batch=5, epochs=2), rounds=5) for a in (FedBN, FedAvg))
    assert torch.equal(one.server.w, two.server.w)


def fedproto_without_pull_is_local(p: LeastSquares) -> None:
    proto, local = finished(FedProto(lam=0.0, **COMMON)), finished(Local(**COMMON))
    assert all(torch.equal(proto.store.get(i).w, local.store.get(i).v) for i in range(6))


def moon_without_contrast_is_fedavg(p: LeastSquares) -> None:
    assert torch.equal(finished(Moon(mu=0.0, **COMMON)).server.w, finished(FedAvg(**COMMON)).server.w)


def fedrod_without_balance_has_fedavgs_model(p: LeastSquares) -> None:
    assert torch.equal(finished(FedRoD(gamma=0.0, **COMMON)).server.w, finished(FedAvg(**COMMON)).server.w)


def fedamp_ends_where_its_pulled_losses_are_smallest(p: LeastSquares) -> None:
    pull, eye = 0.3 / (8.0 / p.clients), np.eye(p.features)
    algorithm = FedAMP(sigma=8.0, lam=0.3, lr=1 / (p.smoothness() + pull), batch=FULL, steps=10)
    run = least_squares(p, algorithm, rounds=25)
    w, xi = run.server.w.numpy(), run.server.xi.numpy()
    assert 0.5 < xi.diagonal().min() < xi.diagonal().max() < 0.9
    for i in range(p.clients):
        np.testing.assert_allclose((p.hessian(i) + pull * eye) @ w[i], p.right(i) + pull * xi[i] @ w, rtol=1e-7)


def fedcac_without_critical_parameters_is_fedavg(p: LeastSquares) -> None:
    cac, avg = (least_squares(p, a, rounds=5) for a in (FedCAC(tau=0.0, lr=0.05, batch=5), FedAvg(lr=0.05, batch=5)))
    assert torch.equal(cac.server.w, avg.server.w)


def feddbe_without_both_parts_is_fedavg(p: LeastSquares) -> None:
    algorithms = (FedDBE(kappa=0.0, prbm=False, lr=0.05, batch=5), FedAvg(lr=0.05, batch=5))
    dbe, avg = (least_squares(p, a, rounds=5) for a in algorithms)
    torch.testing.assert_close(dbe.server.w, avg.server.w, rtol=1e-12, atol=1e-14)


class _Halves(FedCP):
    """FedCP whose policy gives a half to each head, and cannot learn anything else."""

    def around(self, head: nn.Linear) -> nn.Module:
        module = super().around(head)
        with torch.no_grad():
            module.policy.layers[1].weight.zero_()  # and relu has no slope at the bias, zero
        return module


def fedcp_with_fractions_of_a_half_has_personal_optima_and_their_mean_as_common_head(p: LeastSquares) -> None:
    """(W_p + W_g) / 2 is what predicts, what is fitted, and what is sent."""
    run = least_squares(p, _Halves(lr=2 / p.smoothness(), batch=FULL, steps=200, lam=0.0), rounds=2)
    optima = [p.local(i) for i in range(p.clients)]
    before = np.average(optima, axis=0, weights=[len(x) for x in p.x])
    np.testing.assert_allclose(run.server.W_g.numpy(), before, rtol=1e-7)
    for i in range(p.clients):  # fitted in the second round, beside the mean of the first one's
        np.testing.assert_allclose((run.store.get(i).W_p.numpy() + before) / 2, optima[i], rtol=1e-7)


def gpfl_without_guidance_and_with_an_open_valve_is_fedper(p: LeastSquares) -> None:
    test_gpfl.test_without_guidance_and_with_an_open_valve_it_is_fedper()


def pfedfda_all_on_its_own_is_linear_discriminant_analysis(p: LeastSquares) -> None:
    test_pfedfda.test_all_on_its_own_it_is_linear_discriminant_analysis_of_the_clients_samples()


def apfls_mixtures_end_at_each_clients_least_squares(p: LeastSquares) -> None:
    """Whatever alpha is: only there the gradient at the mixture vanishes. What is sent is FedAvg's model."""
    run = least_squares(p, APFL(alpha=0.7, lr=1 / p.smoothness(), batch=FULL), rounds=250)
    np.testing.assert_allclose(run.server.w.numpy(), p.pooled(), rtol=1e-8)
    for i in range(p.clients):
        np.testing.assert_allclose(_personal_vector(run, i), p.local(i), rtol=1e-7)
        v = (p.local(i) - 0.3 * p.pooled()) / 0.7
        np.testing.assert_allclose(personal(run, i), v, rtol=1e-7)


def per_fedavg_is_stationary_for_the_models_after_a_step(p: LeastSquares) -> None:
    alpha = 0.4 / p.smoothness()
    for version, power in (("FO", 1), ("HF", 2)):
        algorithm = PerFedAvg(version=version, alpha=alpha, lr=1 / p.smoothness(), batch=FULL)
        run = least_squares(p, algorithm, rounds=2 * LONG)
        M = [np.linalg.matrix_power(np.eye(p.features) - alpha * p.hessian(i), power) for i in range(p.clients)]
        left, right = (sum(m @ f(i) for i, m in enumerate(M)) for f in (p.hessian, p.right))
        np.testing.assert_allclose(run.server.w.numpy(), np.linalg.solve(left, right), rtol=1e-8)


def fedala_that_learns_no_weights_is_fedavg(p: LeastSquares) -> None:
    ala, avg = (least_squares(p, a, rounds=5) for a in (FedALA(eta=0.0, lr=0.05, batch=5), FedAvg(lr=0.05, batch=5)))
    assert torch.equal(ala.server.theta, avg.server.w)


def fedfomo_without_others_is_local(p: LeastSquares) -> None:
    fomo, local = finished(FedFomo(M=0, **COMMON)), finished(Local(**COMMON))
    assert all(torch.equal(fomo.store.get(i).theta, local.store.get(i).v) for i in range(6))


def fedas_with_nothing_but_a_head_is_local(p: LeastSquares) -> None:
    run = least_squares(p, FedAS(align_lr=0.0, lr=1 / p.smoothness(), batch=FULL), rounds=LONG)
    for i in range(p.clients):
        np.testing.assert_allclose(run.store.get(i).w.numpy(), p.local(i), rtol=1e-8)


def without_fairness_it_is_fedavg_of_equal_clients(algorithm: Algorithm) -> Callable[[LeastSquares], None]:
    """The stationary points of the objectives are in test_fairness.py."""

    def fact(p: LeastSquares) -> None:
        equal = least_squares(p, FedAvg(lr=0.05, batch=5), rounds=5, uploads=UploadSettings(reducer=Mean()))
        assert torch.equal(least_squares(p, algorithm, rounds=5).server.w, equal.server.w)

    return fact


FACTS: dict[str, Callable[[LeastSquares], None]] = {
    "local": local_reaches_each_clients_least_squares,
    "feature-decay": feature_decay_with_nothing_but_a_head_is_local,
    "fedavg": fedavg_with_one_full_step_is_gradient_descent_on_the_pooled_loss,
    "fedavg-ft": fine_tuning_for_long_reaches_each_clients_least_squares,
    "fedprox": fedprox_solves_its_proximal_problem,
    "fedprox-ft": fine_tuning_has_no_proximal_term,
    "ditto": ditto_has_the_pooled_model_and_the_pulled_ones,
    "fedper": fedper_with_nothing_but_a_head_is_local,
    "fedrep": fedrep_with_nothing_but_a_head_is_local,
    "flame": flame_ends_where_its_envelopes_are_smallest,
    "pfedme": pfedme_takes_gradient_steps_on_the_envelopes,
    "fedadmm": fedadmm_ends_where_equal_clients_agree,
    "lp-proj": lp_proj_takes_gradient_steps_in_the_projection,
    "fedeq": fedeq_by_dual_averages_ends_where_equal_clients_agree,
    "fl-deq": fl_deq_of_equal_devices_is_gradient_descent_on_the_mean_of_losses,
    "cfl": cfl_that_never_splits_is_fedavg,
    "fedreco": fedreco_with_nothing_but_a_head_is_local,
    "fedbabu": fedbabu_with_nothing_but_a_head_is_local,
    "fedpac": fedpac_of_equal_clients_is_fedrep,
    "fedcr": fedcr_without_pull_is_fedper,
    "learn2pfed": learn2pfed_without_ties_reaches_each_clients_least_squares,
    "knn-per": the_nearest_neighbour_of_a_training_sample_is_itself,
    "flame-lp-proj": flame_in_the_projection_agrees_on_the_projection,
    "scaffold": scaffold_ends_where_equal_clients_agree_whoever_takes_part,
    "feddyn": feddyn_ends_where_equal_clients_agree,
    "fednova": fednova_has_the_fixed_point_of_normalised_updates,
    "lg-fedavg": lg_fedavg_with_nothing_but_a_head_is_fedavg,
    "fedbn": fedbn_without_batch_normalisation_is_fedavg,
    "fedproto": fedproto_without_pull_is_local,
    "moon": moon_without_contrast_is_fedavg,
    "fedrod": fedrod_without_balance_has_fedavgs_model,
    "fedamp": fedamp_ends_where_its_pulled_losses_are_smallest,
    "fedcac": fedcac_without_critical_parameters_is_fedavg,
    "feddbe": feddbe_without_both_parts_is_fedavg,
    "gpfl": gpfl_without_guidance_and_with_an_open_valve_is_fedper,
    "fedcp": fedcp_with_fractions_of_a_half_has_personal_optima_and_their_mean_as_common_head,
    "pfedfda": pfedfda_all_on_its_own_is_linear_discriminant_analysis,
    "apfl": apfls_mixtures_end_at_each_clients_least_squares,
    "per-fedavg": per_fedavg_is_stationary_for_the_models_after_a_step,
    "fedala": fedala_that_learns_no_weights_is_fedavg,
    "fedfomo": fedfomo_without_others_is_local,
    "fedas": fedas_with_nothing_but_a_head_is_local,
    "q-ffl": without_fairness_it_is_fedavg_of_equal_clients(QFFL(q=0.0, lr=0.05, batch=5)),
    "afl": without_fairness_it_is_fedavg_of_equal_clients(AFL(lam_lr=0.0, lr=0.05, batch=5)),
    "term": without_fairness_it_is_fedavg_of_equal_clients(TERM(t=0.0, lr=0.05, batch=5)),
    "least-squares": least_squares_is_each_clients_and_the_pooled_one,
    "shared-least-squares": shared_least_squares_has_no_gradient_left,
}


@pytest.mark.parametrize("name", slow_except(ALGORITHMS, "fedavg", "fedrep", "learn2pfed"))
def test_known_optimum(name: str, problem: LeastSquares) -> None:
    """An algorithm without an entry in FACTS fails here: its theory is still to be written down."""
    FACTS[name](problem)


def finished(algorithm, **options) -> Simulation:
    run = simulation(algorithm, rounds=5, **options)
    run.run()
    return run


COMMON = {"lr": 0.05, "epochs": 2, "batch": 4}


def test_ditto_without_pull_is_local() -> None:
    ditto, local = finished(Ditto(lam=0.0, **COMMON)), finished(Local(**COMMON))
    for i in range(6):
        assert torch.equal(ditto.store.get(i).v, local.store.get(i).v)


def test_dittos_global_model_is_fedavgs() -> None:
    assert torch.equal(finished(Ditto(**COMMON)).server.w, finished(FedAvg(**COMMON)).server.w)


@pytest.mark.slow
def test_ditto_with_an_infinite_pull_has_the_global_model_everywhere(problem: LeastSquares) -> None:
    gaps = []
    for lam in (1e2, 1e3, 1e4):
        algorithm = Ditto(
            lr=1 / problem.smoothness(), batch=FULL, lam=lam, personal_lr=1 / (problem.smoothness() + lam)
        )
        run = least_squares(problem, algorithm, rounds=300)
        gaps.append(max((run.store.get(i).v - run.server.w).norm().item() for i in range(problem.clients)))
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.05)  # the gap is of the order 1 / lam
    assert gaps[1] / gaps[2] == pytest.approx(10, rel=0.005)


def test_fedprox_without_pull_is_fedavg() -> None:
    assert torch.equal(finished(FedProx(mu=0.0, **COMMON)).server.w, finished(FedAvg(**COMMON)).server.w)


def test_fedprox_with_pull_is_not_fedavg() -> None:
    assert not torch.equal(finished(FedProx(mu=0.5, **COMMON)).server.w, finished(FedAvg(**COMMON)).server.w)


@pytest.mark.parametrize("method", [FedRep, FedPer])
def test_a_method_with_an_empty_head_is_fedavg(method: type) -> None:
    own, fedavg = finished(method(**COMMON), head=None), finished(FedAvg(**COMMON), head=None)
    [body] = own.server.values()
    assert torch.equal(body, fedavg.server.w)
    assert len(own.store.get(0)) == 1
    assert own.schema.parameters_personal == 0


def test_fedrep_moves_the_head_first_and_then_the_body() -> None:
    run = simulation(FedRep(head_epochs=3, **COMMON), participation=1.0, rounds=1)
    space = run.task.space
    w0 = run.task.w0.clone()
    work = run.executor.pool.each(
        lambda own, job: run.executor._work(own, 1, job, "batches").descend(w0, part="head", epochs=3, stream=1),
        [_job(run)],
    )
    after_head = next(iter(work))
    run.run()
    assert torch.equal(space.body(after_head), space.body(w0))
    assert torch.equal(run.store.get(0).h, space.head(after_head))
    assert not torch.equal(run.server.phi, space.body(w0))


def _job(run: Simulation):
    from equipoise.executors.base import ClientJob

    return ClientJob(0, run.store.get(0), run.server)


def test_equal_clients_need_no_federation() -> None:
    """If all clients hold the same samples, FedAvg with full batches is what each would do alone."""
    from equipoise.data.federation import from_clients

    one = classification(1)
    x, y = one.x.numpy(), one.y.numpy()
    same = from_clients([{"train": (x, y), "test": (x, y)}] * 3)
    options = {"lr": 0.1, "epochs": 3, "batch": FULL}
    fedavg = finished(FedAvg(**options), federation=same, participation=1.0)
    local = finished(Local(**options), federation=same, participation=1.0)
    torch.testing.assert_close(fedavg.server.w, local.store.get(0).v, rtol=1e-9, atol=1e-12)
