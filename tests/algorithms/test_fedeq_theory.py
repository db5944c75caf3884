"""FeDEQ's three starts and two averages: identities that hold in every round, descent, and limits."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.algorithms import FeDEQ, FedRep
from equipoise.algorithms.base import Algorithm
from equipoise.data.federation import from_clients
from equipoise.engine.simulation import Simulation
from tests.algorithms.test_fedeq import PROBLEM, L, TwoParts, lagrangian, one_step, states
from tests.support.problems import FULL, LeastSquares, classification, linear_module, simulation

STARTS = ("own", "consensus", "published")
SIZES = np.array([len(x) for x in PROBLEM.x], dtype=float)


def rounds(algorithm: FeDEQ, count: int, participation: float = 1.0) -> Iterator[Simulation]:
    """Yield a run on two parts before its first round and after every round."""
    kinds: dict[str, Any] = {"loss": "squared", "evaluate_every": 10**6, "mode": "stacked", "rounds": count}
    run = simulation(algorithm, PROBLEM.federation(), TwoParts(), participation=participation, **kinds)
    try:
        yield run
        for _ in range(count):
            run.advance()
            yield run
    finally:
        run.close()


def bodies(p: LeastSquares, algorithm: FeDEQ, count: int) -> list[tuple[np.ndarray, ...]]:
    """theta, the theta_i and the lam_i of a run without heads, before the first round and after each."""
    kinds: dict[str, Any] = {"head": None, "loss": "squared", "evaluate_every": 10**6, "mode": "stacked"}
    run = simulation(algorithm, p.federation(), linear_module(p.features), participation=1.0, rounds=count, **kinds)
    found = []
    for _ in range(count + 1):
        clients = [run.store.get(i) for i in range(p.clients)]
        found.append(
            (
                run.server.theta.numpy(),
                np.stack([c.theta_i.numpy() for c in clients]),
                np.stack([c.lam_i.numpy() for c in clients]),
            )
        )
        if run.done < count:
            run.advance()
    run.close()
    return found


def weights(begin: str) -> np.ndarray:
    """Of the clients in the plain mean: n_i in the published code, else all the same."""
    return SIZES / SIZES.sum() if begin == "published" else np.full(PROBLEM.clients, 1 / PROBLEM.clients)


@pytest.mark.parametrize("begin", STARTS)
def test_with_all_clients_the_plain_mean_ties_the_duals_to_the_start_in_every_round(begin: str) -> None:
    """Sum lam_i = n rho (mean theta_i - theta0), whatever the clients do; weighted where the mean is."""
    rho, share, start = 0.7, weights(begin), np.zeros(2)
    for k, run in enumerate(rounds(one_step(rho, begin=begin), 12)):
        theta, duals = run.server.theta.numpy(), np.stack([lam for _, lam, _ in states(run)])
        start = start if k else theta
        np.testing.assert_allclose(share @ duals, rho * (theta - start), rtol=1e-9, atol=1e-13)
    assert np.abs(duals).max() > 1e-2


@pytest.mark.parametrize("begin", STARTS)
def test_with_all_clients_the_dual_mean_leaves_duals_that_vanish_with_the_motion(begin: str) -> None:
    """Sum lam_i = n rho (m - m before) with m = mean theta_i, and theta = 2m - m before: zero in every limit."""
    rho, means, longest = 0.7, [], 0.0
    for run in rounds(one_step(rho, begin=begin, average="dual"), 12):
        means.append(np.mean([theta_i for theta_i, _, _ in states(run)], axis=0))
        if len(means) > 1:
            duals = np.mean([lam for _, lam, _ in states(run)], axis=0)
            np.testing.assert_allclose(duals, rho * (means[-1] - means[-2]), rtol=1e-9, atol=1e-13)
            np.testing.assert_allclose(run.server.theta.numpy(), 2 * means[-1] - means[-2], rtol=1e-9, atol=1e-13)
            longest = max(longest, np.abs(duals).max())
    assert longest > 1e-2


@pytest.mark.parametrize("begin", STARTS)
def test_the_printed_mean_is_not_the_argmin_of_the_lagrangian_and_the_dual_one_is(begin: str) -> None:
    """Lemma 4.2 takes averaging for the minimum over theta; the printed mean leaves a gradient there, -sum lam_i.

    It is the minimum once n rho / 2 ||theta - theta0||^2 is added (with equal weights).
    """
    rho, start = 0.7, np.zeros(2)
    for average in ("plain", "dual"):
        for k, run in enumerate(rounds(one_step(rho, begin=begin, average=average), 8)):
            theta = run.server.theta.numpy()
            start = start if k else theta
            slope = sum(-lam - rho * (theta_i - theta) for theta_i, lam, _ in states(run))
            if average == "dual":
                np.testing.assert_allclose(slope, 0, atol=1e-12)
            elif begin != "published":
                pulled = slope + PROBLEM.clients * rho * (theta - start)
                np.testing.assert_allclose(pulled, 0, atol=1e-12)
        assert (np.abs(slope).max() > 1e-2) == (average == "plain")


def test_one_step_from_the_consensus_is_gradient_descent_pulled_to_the_start(problem: LeastSquares) -> None:
    """All clients, plain: theta descends on mean L_i + rho / 2 ||theta - theta0||^2, as the mean dual is its pull."""
    rho, smooth = 0.9, problem.smoothness()
    algorithm = FeDEQ(rho=rho, begin="consensus", lr=1 / (smooth + rho), head_epochs=1, epochs=1, batch=FULL)
    hessian, right = (np.mean([f(i) for i in range(problem.clients)], 0) for f in (problem.hessian, problem.right))
    found = [theta for theta, _, _ in bodies(problem, algorithm, 12)]
    for before, after in pairwise(found):
        slope = hessian @ before - right + rho * (before - found[0])
        np.testing.assert_allclose(after, before - slope / (smooth + rho), rtol=1e-10, atol=1e-13)


def test_one_step_from_the_consensus_with_dual_means_is_descent_with_momentum(problem: LeastSquares) -> None:
    """m' = m + L / (L + rho) (m - m before) - gradient of mean L_i at theta / (L + rho), theta = 2m - m before."""
    rho, smooth = 0.9, problem.smoothness()
    settings = {"lr": 1 / (smooth + rho), "head_epochs": 1, "epochs": 1, "batch": FULL}
    found = bodies(problem, FeDEQ(rho=rho, begin="consensus", average="dual", **settings), 12)
    hessian, right = (np.mean([f(i) for i in range(problem.clients)], 0) for f in (problem.hessian, problem.right))
    means = [found[0][0], *(theta_i.mean(0) for _, theta_i, _ in found)]
    for k in range(1, 13):
        m, before, theta = means[k], means[k - 1], found[k - 1][0]
        moved = smooth / (smooth + rho) * (m - before) - (hessian @ theta - right) / (smooth + rho)
        np.testing.assert_allclose(means[k + 1], m + moved, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("average", ["plain", "dual"])
@pytest.mark.parametrize("begin", ["consensus", "published"])
def test_the_limit_depends_on_the_average_and_not_on_the_start(problem: LeastSquares, begin: str, average: str) -> None:
    """Plain: argmin sum n_i L_i + rho / 2 sum n_i ||theta - theta0||^2, all n_i equal but in the published code."""
    rho = 1.0
    settings = {"lr": 1 / (problem.smoothness() + rho), "head_epochs": 1, "epochs": 6, "batch": FULL}
    algorithm = FeDEQ(rho=rho, begin=begin, average=average, **settings)
    found = bodies(problem, algorithm, 90)
    n, start = [len(x) if (begin, average) == ("published", "plain") else 1 for x in problem.x], found[0][0]
    hessian, right = (sum(n[i] * f(i) for i in range(problem.clients)) for f in (problem.hessian, problem.right))
    pull = sum(n) * rho if average == "plain" else 0.0
    wanted = np.linalg.solve(hessian + pull * np.eye(problem.features), right + pull * start)
    theta, theta_i, lam = found[-1]
    np.testing.assert_allclose(theta, wanted, rtol=1e-6)
    np.testing.assert_allclose(theta_i - theta, 0, atol=1e-6)
    for i in range(problem.clients):  # every client is stationary with its own dual
        np.testing.assert_allclose(problem.hessian(i) @ theta - problem.right(i) + lam[i], 0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_from_the_consensus_the_lagrangian_falls_and_ends_at_a_stationary_point(participation: float) -> None:
    """The step is the proximal one that the proof is about (Eqs. 15, 16, 19), with the mean that is the argmin."""
    rho = 7 * L
    values, absent, count = [], set(range(PROBLEM.clients)), 200 if participation == 1.0 else 450
    for run in rounds(one_step(rho, begin="consensus", average="dual"), count, participation):
        absent -= set(run.sample(run.done)) if run.done else set()
        if not absent:
            values.append(lagrangian(run, rho))
            absent = set(range(PROBLEM.clients))
    smallest = sum(np.mean((PROBLEM.x[i] @ PROBLEM.local(i) - PROBLEM.y[i]) ** 2) for i in range(PROBLEM.clients))
    assert (np.diff(values) <= 1e-10).all()
    assert values[-1] < values[0] - 1e-3
    assert min(values) >= smallest - 1e-12
    theta = run.server.theta.numpy()
    for i, (theta_i, lam_i, w_i) in enumerate(states(run)):
        gradient = PROBLEM.hessian(i) @ np.concatenate([theta_i, w_i]) - PROBLEM.right(i)
        np.testing.assert_allclose(theta_i, theta, atol=1e-5)
        np.testing.assert_allclose(gradient[:2] + lam_i, 0, atol=1e-4)
        np.testing.assert_allclose(gradient[2:], 0, atol=1e-4)


def finished(algorithm: Algorithm, equal: bool = False, **kinds: Any) -> Simulation:
    federation = classification()
    if equal:  # as many samples each, so that a weighted mean is a plain one
        parts = [federation.gather(torch.from_numpy(federation.train[i][:3])) for i in range(6)]
        federation = from_clients([{"train": part, "test": part} for part in parts])
    run = simulation(algorithm, federation, **{"rounds": 5, "participation": 0.5, **kinds})
    run.run()
    return run


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_without_a_penalty_the_consensus_start_is_fedrep(mode: str) -> None:
    settings = {"lr": 0.05, "batch": 2, "epochs": 2, "head_epochs": 3, "momentum": 0.5}
    ours = finished(FeDEQ(rho=0.0, begin="consensus", **settings), equal=True, mode=mode)
    theirs = finished(FedRep(**settings), equal=True, mode=mode)
    torch.testing.assert_close(ours.server.theta, theirs.server.phi, rtol=1e-13, atol=1e-15)
    for i in range(6):
        torch.testing.assert_close(ours.store.get(i).w_i, theirs.store.get(i).h, rtol=1e-13, atol=1e-15)
        assert not ours.store.get(i).lam_i.any()


def test_without_a_penalty_the_published_start_is_fedrep_while_nobody_comes_twice_in_a_row() -> None:
    """To the last bit, whatever the clients' sizes, as both weigh by them."""
    settings = {"lr": 0.05, "batch": 4, "epochs": 2, "head_epochs": 3}
    kinds = {"participation": 1, "rounds": 5, "seed": _a_seed_without_neighbours(5)}
    ours, theirs = (
        finished(FeDEQ(rho=0.0, begin="published", **settings), **kinds),
        finished(FedRep(**settings), **kinds),
    )
    assert torch.equal(ours.server.theta, theirs.server.phi)
    for i in range(6):
        assert torch.equal(ours.store.get(i).w_i, theirs.store.get(i).h)


def _a_seed_without_neighbours(count: int) -> int:
    for seed in range(100):
        run = simulation(FeDEQ(), rounds=count, participation=1, seed=seed)
        run.close()
        drawn = [run.sample(round)[0] for round in range(1, count + 1)]
        if all(a != b for a, b in pairwise(drawn)) and len(set(drawn)) < count:
            return seed
    raise AssertionError


class HeadOnOwn(FeDEQ):
    """Own start with the head fitted on theta_i: the published rule without its weights and without a memory."""

    def local_update(self, client: Any, down: Any, data: Any) -> Any:
        kept, upload = FeDEQ.local_update(
            self.model_copy(update={"begin": "published"}),
            type(client)(client, last_round=torch.full_like(data.size, data.round - 1)),
            down,
            data,
        )
        return type(client)({k: t for k, t in kept.items() if k != "last_round"}), upload


@pytest.mark.parametrize("average", ["plain", "dual"])
def test_with_everybody_in_every_round_published_is_own_with_the_head_fitted_on_it(average: str) -> None:
    settings = {"rho": 0.3, "lr": 0.05, "batch": 4, "epochs": 2, "head_epochs": 2, "average": average}
    ours = finished(FeDEQ(begin="published", **settings), participation=1.0)
    theirs = finished(HeadOnOwn(begin="own", **settings), participation=1.0)
    assert torch.equal(ours.server.theta, theirs.server.theta)
    other = finished(FeDEQ(begin="own", **settings), participation=1.0)
    assert not torch.allclose(ours.server.theta, other.server.theta)


@pytest.mark.parametrize("average", ["plain", "dual"])
def test_with_nobody_twice_in_a_row_published_is_the_consensus_start(average: str) -> None:
    """With one client a round its weight does not matter; duals are kept across absences in both."""
    settings = {"rho": 0.3, "lr": 0.05, "batch": 4, "epochs": 2, "head_epochs": 2, "average": average}
    kinds = {"participation": 1, "rounds": 5, "seed": _a_seed_without_neighbours(5)}
    ours = finished(FeDEQ(begin="published", **settings), **kinds)
    theirs = finished(FeDEQ(begin="consensus", **settings), **kinds)
    assert torch.equal(ours.server.theta, theirs.server.theta)
    for i in range(6):
        for name, t in theirs.store.get(i).items():
            assert torch.equal(ours.store.get(i)[name], t)


@pytest.mark.parametrize("begin", STARTS)
def test_what_the_dual_mean_changes_by_is_the_difference_of_messages(begin: str) -> None:
    """The reference of clipping and noise is what the client sent last, or the initial upload before that."""
    run = simulation(FeDEQ(begin=begin, rho=0.3, lr=0.05, batch=4, average="dual"), rounds=6, participation=0.5)
    last = {i: run.algorithm.initial_upload(run.start) for i in range(6)}
    for round in range(1, 7):
        jobs = [run.job(who) for who in run.sample(round)]
        for result in run.executor.train(round, jobs, lambda: False):
            assert torch.equal(result.upload.reference.theta, last[result.who].theta)
            last[result.who] = result.upload.message
        run.advance()
        torch.testing.assert_close(run.server.theta, torch.stack([m.theta for m in last.values()]).mean(0))
    run.close()


def test_states_of_earlier_versions_are_those_of_the_first_two_starts() -> None:
    """Their checkpoints are read as they are; the third start keeps one number more."""
    for begin in STARTS:
        run = simulation(FeDEQ(begin=begin))
        run.close()
        more = {"last_round"} if begin == "published" else set()
        assert run.schema.client.keys() == {"theta_i", "lam_i", "w_i"} | more
