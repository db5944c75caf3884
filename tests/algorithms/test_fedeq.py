"""FeDEQ: descent, consensus and stationarity on a smooth problem, and the two limits of its two averages."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.algorithms import FeDEQ
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.executors.build import build_executor
from tests.support.problems import FULL, LeastSquares, classification, least_squares, simulation, small_mlp


class TwoParts(nn.Module):
    """y = theta·x1 + w·x2: smooth in both, and jointly."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
        for layer in (self.body, self.head):
            nn.init.constant_(layer.weight, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x[:, :2]) + self.head(x[:, 2:])
        return out


PROBLEM = LeastSquares(clients=5, samples=200, features=4)
L = PROBLEM.smoothness()


def one_step(rho: float, **more: object) -> FeDEQ:
    """A gradient step of 1/L for w_i and one of 1/(L + rho) for theta_i, on all samples: what the lemmas speak of."""
    return FeDEQ(rho=rho, lr=1 / (L + rho), head_lr=1 / L, head_epochs=1, epochs=1, batch=FULL, **more)


def loss(i: int, theta: np.ndarray, w: np.ndarray) -> float:
    return float(np.mean((PROBLEM.x[i] @ np.concatenate([theta, w]) - PROBLEM.y[i]) ** 2))


def states(run: Simulation) -> list[tuple[np.ndarray, ...]]:
    found = [run.store.get(i) for i in range(PROBLEM.clients)]
    return [(s.theta_i.numpy(), s.lam_i.numpy(), s.w_i.numpy()) for s in found]


def lagrangian(run: Simulation, rho: float) -> float:
    theta = run.server.theta.numpy()
    return sum(
        loss(i, t, w) + lam @ (t - theta) + rho / 2 * np.sum((t - theta) ** 2)
        for i, (t, lam, w) in enumerate(states(run))
    )


def rounds(algorithm: FeDEQ, count: int, participation: float) -> Iterator[Simulation]:
    run = simulation(
        algorithm,
        PROBLEM.federation(),
        TwoParts(),
        loss="squared",
        rounds=count,
        participation=participation,
        evaluate_every=10**6,
        mode="stacked",
    )
    try:
        for _ in range(count):
            run.advance()
            yield run
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_the_lagrangian_falls_once_all_have_taken_part_and_is_bounded_below(participation: float) -> None:
    rho = 7 * L  # Lemma 4.2 asks for rho > 6L
    values, absent = [], set(range(PROBLEM.clients))
    for run in rounds(one_step(rho, average="dual"), 120, participation):
        absent -= set(run.sample(run.done))
        if not absent:
            values.append(lagrangian(run, rho))
            absent = set(range(PROBLEM.clients))
    smallest = sum(np.mean((PROBLEM.x[i] @ PROBLEM.local(i) - PROBLEM.y[i]) ** 2) for i in range(PROBLEM.clients))
    assert len(values) > 5
    assert (np.diff(values) <= 1e-10).all()
    assert values[-1] < values[0] - 1e-3
    assert min(values) >= smallest - 1e-12  # Lemma 4.4: nothing is below the smallest sum of losses


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_it_ends_in_consensus_at_a_stationary_point(participation: float) -> None:
    rho = 7 * L
    *_, run = rounds(one_step(rho, average="dual"), 400 if participation == 1.0 else 1000, participation)
    theta = run.server.theta.numpy()
    for i, (theta_i, lam_i, w_i) in enumerate(states(run)):
        gradient = PROBLEM.hessian(i) @ np.concatenate([theta_i, w_i]) - PROBLEM.right(i)
        np.testing.assert_allclose(theta_i, theta, atol=1e-6)  # Theorem 4.5
        np.testing.assert_allclose(gradient[:2] + lam_i, 0, atol=1e-5)  # Theorem 4.6
        np.testing.assert_allclose(gradient[2:], 0, atol=1e-5)


def exact(p: LeastSquares, rho: float, average: str) -> FeDEQ:
    return FeDEQ(rho=rho, average=average, lr=1 / (p.smoothness() + rho), head_epochs=1, epochs=8, batch=FULL)


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.5, 2.0])
def test_the_plain_average_ends_pulled_towards_the_start(problem: LeastSquares, rho: float) -> None:
    """argmin sum L_i + n rho / 2 ||theta - theta0||^2, as the sum of the duals is n rho (mean theta_i - theta0)."""
    run = least_squares(problem, exact(problem, rho, "plain"), head=None, rounds=400)
    n, start = problem.clients, run.task.w0.numpy()
    hessian, right = (sum(f(i) for i in range(n)) for f in (problem.hessian, problem.right))
    pulled = np.linalg.solve(hessian + n * rho * np.eye(problem.features), right + n * rho * start)
    np.testing.assert_allclose(run.server.theta.numpy(), pulled, rtol=1e-7)
    duals = sum(run.store.get(i).lam_i for i in range(n)).numpy()
    np.testing.assert_allclose(duals, n * rho * (run.server.theta.numpy() - start), rtol=1e-7)
    assert np.abs(duals).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.5, 2.0])
def test_the_dual_average_ends_where_all_losses_together_are_smallest(problem: LeastSquares, rho: float) -> None:
    run = least_squares(problem, exact(problem, rho, "dual"), head=None, rounds=400)
    hessian, right = (sum(f(i) for i in range(problem.clients)) for f in (problem.hessian, problem.right))
    np.testing.assert_allclose(run.server.theta.numpy(), np.linalg.solve(hessian, right), rtol=1e-7)
    np.testing.assert_allclose(sum(run.store.get(i).lam_i for i in range(problem.clients)).numpy(), 0, atol=1e-7)


def test_absent_clients_keep_theta_i_and_lam_i_and_start_from_them_again() -> None:
    """theta_i is not set back to the consensus, whether or not the client was there in the round before."""
    run = simulation(FeDEQ(lr=0.05, rho=0.3, epochs=1, head_epochs=1, batch=FULL), rounds=12, participation=2)
    before = [run.store.get(i) for i in range(6)]
    returned, away = 0, set()
    for round in range(1, 13):
        present, theta = run.sample(round), run.server.theta
        run.advance()
        for i in range(6):
            now = run.store.get(i)
            if i not in present:
                assert all(torch.equal(now[k], before[i][k]) for k in before[i])
                continue
            torch.testing.assert_close(now.lam_i, before[i].lam_i + 0.3 * (now.theta_i - theta))
            slope = _slope(run, i, before[i].theta_i, now.w_i) + before[i].lam_i + 0.3 * (before[i].theta_i - theta)
            torch.testing.assert_close(now.theta_i, before[i].theta_i - 0.05 * slope)  # one step, from its own theta_i
            returned += i in away and not torch.equal(before[i].theta_i, theta)
        away = set(range(6)) - set(present)
        before = [run.store.get(i) for i in range(6)]
    run.close()
    assert returned >= 2  # clients that were not there in the round before, and had a theta_i of their own
    torch.testing.assert_close(run.server.theta, torch.stack([before[i].theta_i for i in present]).mean(0))


def test_the_first_step_of_the_body_is_one_on_the_augmented_lagrangian() -> None:
    rho = 0.7
    run = simulation(FeDEQ(lr=0.05, rho=rho, epochs=1, head_epochs=2, batch=FULL), rounds=3, participation=1.0)
    run.advance()
    run.advance()
    old, theta = run.store.get(4), run.server.theta
    run.advance()
    new = run.store.get(4)
    theta_i = old.theta_i.clone().requires_grad_()
    value = _loss(run, 4, theta_i, new.w_i) + old.lam_i @ (theta_i - theta) + rho / 2 * (theta_i - theta).square().sum()
    (slope,) = torch.autograd.grad(value, theta_i)
    torch.testing.assert_close(new.theta_i, old.theta_i - 0.05 * slope)
    run.close()


def test_training_may_begin_at_the_consensus() -> None:
    rho = 0.7
    settings = {"lr": 0.05, "rho": rho, "epochs": 1, "head_epochs": 2, "batch": FULL}
    run = simulation(FeDEQ(begin="consensus", **settings), rounds=3, participation=1.0)
    run.advance()
    run.advance()
    old, theta = run.store.get(4), run.server.theta
    run.advance()
    new = run.store.get(4)
    slope = _slope(run, 4, theta, new.w_i) + old.lam_i  # the penalty has no gradient there
    assert old.lam_i.norm() > 0
    torch.testing.assert_close(new.theta_i, theta - 0.05 * slope)
    run.close()


def _loss(run: Simulation, who: int, theta: Tensor, w: Tensor) -> Tensor:
    """L_i(theta, w), by plain autograd on the module."""
    views = run.task.space.views(run.task.space.join(theta, w))
    x, y = run.federation.gather(torch.from_numpy(run.federation.train[who]))
    return nn.functional.cross_entropy(torch.func.functional_call(small_mlp().double(), views, (x,)), y)


def _slope(run: Simulation, who: int, theta: Tensor, w: Tensor) -> Tensor:
    theta = theta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(_loss(run, who, theta, w), theta)
    return slope


def test_both_models_are_scored_each_with_its_own_body() -> None:
    run = simulation(FeDEQ(lr=0.1, rho=0.1, batch=4), rounds=3, participation=0.5)
    run.run()
    tables = run.scores.tables()
    assert {"personal", "consensus"} == tables.keys()
    for i in range(6):
        state = run.store.get(i)
        x, y = run.federation.gather(torch.from_numpy(run.federation.test[i]))
        for kind, body in (("personal", state.theta_i), ("consensus", run.server.theta)):
            module = run.task.to_module(run.task.space.join(body, state.w_i))
            wanted = nn.functional.cross_entropy(module(x), y).item()
            assert tables[kind][i, 2] == pytest.approx(wanted, rel=1e-9)
    summary = run.summary()
    assert summary["personal"] != summary["consensus"]
    assert "global" not in summary


def test_unseen_clients_train_their_head_alone() -> None:
    federation = classification().holding_out(0.2, 0)
    run = simulation(FeDEQ(lr=0.1, batch=4), federation, rounds=3)
    run.run()
    (name,) = federation.unseen
    who = federation.names.index(name)
    vector = next(iter(_reopened(run, who)))[0].vector
    assert torch.equal(run.task.space.body(vector), run.server.theta)
    assert not torch.equal(run.task.space.head(vector), run.task.space.head(run.task.w0))
    assert {"personal"} == run.summary()["unseen"].keys() - {"clients", "adaptation_samples"}


def _reopened(run: Simulation, who: int):
    executor = build_executor(run.engine, run.task, run.federation, run.algorithm, run.schedule)
    try:
        yield from executor.models(run.done, [run.job(who)], "unseen")
    finally:
        executor.close()


def test_the_published_start_is_kept_only_by_clients_of_the_round_before() -> None:
    """The head, too, is fitted on that start, and the mean is weighted by numbers of samples."""
    rho, settings = 0.3, {"lr": 0.05, "epochs": 1, "head_epochs": 1, "batch": FULL}
    run = simulation(FeDEQ(begin="published", rho=rho, **settings), rounds=12, participation=3)
    seen, last = {"kept": 0, "reset": 0}, set()
    for round in range(1, 13):
        before, theta = [run.store.get(i) for i in range(6)], run.server.theta
        run.advance()
        present = run.sample(round)
        for i in present:
            old, now = before[i], run.store.get(i)
            start = old.theta_i if i in last else theta
            seen["kept" if i in last else "reset"] += not torch.equal(old.theta_i, theta)
            head = old.w_i.clone().requires_grad_()
            (slope,) = torch.autograd.grad(_loss(run, i, start, head), head)
            torch.testing.assert_close(now.w_i, old.w_i - 0.05 * slope)
            slope = _slope(run, i, start, now.w_i) + old.lam_i + rho * (start - theta)
            torch.testing.assert_close(now.theta_i, start - 0.05 * slope)
            torch.testing.assert_close(now.lam_i, old.lam_i + rho * (now.theta_i - theta))
        n = torch.tensor([len(run.federation.train[i]) for i in present], dtype=torch.float64)
        mean = torch.stack([run.store.get(i).theta_i for i in present]).T @ (n / n.sum())
        torch.testing.assert_close(run.server.theta, mean)
        last = set(present)
    run.close()
    assert min(seen.values()) >= 5


def test_the_dual_average_needs_rho_above_zero() -> None:
    assert FeDEQ(rho=0.0).rho == 0
    with pytest.raises(EquipoiseError, match=r'rho = 0 is not allowed with algorithm\.average = "dual"'):
        FeDEQ(rho=0.0, average="dual")
