"""What FLAME's theory says of every round, of where it ends, and of its relatives."""

import math

import numpy as np
import pytest
import torch

from equipoise.algorithms import FedADMM, FedAvg, Flame, FlameLpProj, LpProj, PFedMe
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.reducers import Mean
from tests.support.problems import FULL, LeastSquares, least_squares, linear_module, simulation

M = 4
"how many clients the least-squares problem has"


def exact(p: LeastSquares, **settings) -> Flame:
    """Local problems are solved to the end: many full steps of the best rate."""
    lam = settings.get("lam", 1.0)
    return Flame(lr=1 / (p.smoothness() + lam), batch=FULL, **{"steps": 100, **settings})


def rounds(p: LeastSquares, algorithm, count: int, **schedule):
    """The run after each of `count` rounds."""
    federation, module = p.federation(), linear_module(p.features)
    schedule = {"participation": 1.0, "evaluate_every": 10**6, "mode": "stacked", **schedule}
    run = simulation(algorithm, federation, module, loss="squared", rounds=count, **schedule)
    for _ in range(count):
        run.advance()
        yield run
    run.close()


def lagrangian(p: LeastSquares, run: Simulation) -> float:
    """Eq. 10."""
    algorithm, total = run.algorithm, 0.0
    for i in range(p.clients):
        state, w = run.store.get(i), run.server.w
        f = float(np.mean((p.x[i] @ state.theta.numpy() - p.y[i]) ** 2))
        gap = state.w_i - w
        total += (f + algorithm.lam / 2 * float((state.theta - state.w_i).square().sum())) / M
        total += float(state.pi @ gap) + algorithm.rho / 2 * float(gap.square().sum())
    return total


@pytest.mark.slow
@pytest.mark.parametrize("alpha", ["equal", "samples"])
@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_lemma_3_and_the_servers_optimality_after_every_round(alpha: str, mode: str) -> None:
    algorithm = Flame(lam=0.7, rho=0.3, lr=0.05, epochs=2, batch=4, alpha=alpha)
    run = simulation(algorithm, mode=mode, rounds=7, participation=2)
    sizes = torch.from_numpy(run.federation.train.lengths).double()
    for _ in range(7):
        run.advance()
        states = [run.store.get(i) for i in range(6)]
        for i, state in enumerate(states):
            weight = 1 / 6 if alpha == "equal" else sizes[i] / sizes.sum()
            torch.testing.assert_close(state.pi, algorithm.lam * weight * (state.theta - state.w_i))
        total = sum(algorithm.rho * (state.w_i - run.server.w) + state.pi for state in states)
        torch.testing.assert_close(total, torch.zeros_like(total))
    run.close()
    assert any(state.pi.abs().max() > 1e-4 for state in states)


def test_absent_clients_keep_everything_and_count_with_their_last_message() -> None:
    run = simulation(Flame(lr=0.05, batch=4, rho=0.3), rounds=5, participation=1)
    before = [run.store.get(i) for i in range(6)]
    for round in range(1, 6):
        present = run.sample(round)
        run.advance()
        for i in range(6):
            same = torch.equal(before[i].theta, run.store.get(i).theta)
            assert same == (i not in present)
        before = [run.store.get(i) for i in range(6)]
        u = torch.stack([state.w_i + state.pi / 0.3 for state in before])
        torch.testing.assert_close(run.server.w, u.mean(0), rtol=1e-12, atol=1e-14)
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_lagrangian_falls_in_the_range_of_the_theory(problem: LeastSquares, participation: float) -> None:
    algorithm = exact(problem, lam=2.0, rho=3 * 2.0 / M)
    values = [lagrangian(problem, run) for run in rounds(problem, algorithm, 25, participation=participation)]
    assert (np.diff(values) <= 1e-12).all()
    assert values[-1] < values[0] - 1e-3


@pytest.mark.slow
def test_the_lagrangian_is_never_below_the_smallest_objective(problem: LeastSquares) -> None:
    w, theta = closed_form(problem, 2.0)
    smallest = np.mean(
        [
            np.mean((problem.x[i] @ theta[i] - problem.y[i]) ** 2) + np.sum((theta[i] - w) ** 2)  # lam / 2 = 1
            for i in range(M)
        ]
    )
    algorithm = exact(problem, lam=2.0, rho=2.0 / M)  # Lemma 4 asks for rho >= lam alpha
    values = [lagrangian(problem, run) for run in rounds(problem, algorithm, 25)]
    assert min(values) >= smallest - 1e-12
    assert values[-1] == pytest.approx(smallest, rel=1e-3)


def closed_form(p: LeastSquares, lam: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """Where it ends: grad f_i(theta_i) + lam (theta_i - w) = 0 and w the mean of theta_i."""
    eye = np.eye(p.features)
    inverse = [np.linalg.inv(p.hessian(i) + lam * eye) for i in range(p.clients)]
    right = np.mean([inverse[i] @ p.hessian(i) @ p.local(i) for i in range(p.clients)], axis=0)
    w = np.linalg.solve(eye - lam * np.mean(inverse, axis=0), right)
    return w, [inverse[i] @ (p.right(i) + lam * w) for i in range(p.clients)]


@pytest.mark.slow
@pytest.mark.parametrize(("participation", "count"), [(1.0, 250), (0.5, 700)])
def test_it_ends_at_the_closed_form(problem: LeastSquares, participation: float, count: int) -> None:
    lam = 0.8
    algorithm = exact(
        problem, lam=lam, rho=3 * lam / M, steps=20
    )  # the limit is the same, as each goes on from the last
    run = least_squares(problem, algorithm, rounds=count, participation=participation)
    w, theta = closed_form(problem, lam)
    np.testing.assert_allclose(run.server.w.numpy(), w, rtol=1e-7)
    states = [run.store.get(i) for i in range(M)]
    for i, state in enumerate(states):
        np.testing.assert_allclose(state.theta.numpy(), theta[i], rtol=1e-7)
        np.testing.assert_allclose(state.w_i.numpy(), w, rtol=1e-6)
    np.testing.assert_allclose(sum(state.pi for state in states).numpy(), 0, atol=1e-8)


@pytest.mark.slow
def test_with_a_large_lam_it_ends_where_fedadmm_ends(problem: LeastSquares) -> None:
    hessians, rights = (sum(f(i) for i in range(M)) for f in (problem.hessian, problem.right))
    agreed = np.linalg.solve(hessians, rights)
    algorithm = FedADMM(rho=2 / M, lr=1 / (problem.smoothness() + 2), batch=FULL, steps=40)
    run = least_squares(problem, algorithm, rounds=200)
    np.testing.assert_allclose(run.server.w.numpy(), agreed, rtol=1e-8)
    gaps = [np.abs(closed_form(problem, lam)[0] - agreed).max() for lam in (1e2, 1e3, 1e4)]
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.1)
    assert gaps[1] / gaps[2] == pytest.approx(10, rel=0.01)


def test_fedadmm_without_duals_and_rho_is_fedavg_of_equal_clients() -> None:
    common = {"lr": 0.05, "epochs": 2, "batch": 4}
    admm = simulation(FedADMM(rho=0.0, dual=False, **common), participation=1.0)
    average = simulation(FedAvg(**common), participation=1.0, uploads=UploadSettings(reducer=Mean()))
    for run in (admm, average):
        run.run()
    torch.testing.assert_close(admm.server.w, average.server.w, rtol=1e-12, atol=1e-13)


def test_the_first_step_of_w_i_is_one_of_pfedme() -> None:
    lam, rho, common = 0.7, 0.3, {"lr": 0.05, "epochs": 2, "batch": 4}
    alpha = 1 / 6
    flame = simulation(Flame(lam=lam, rho=rho, **common), rounds=1, participation=1.0)
    step = PFedMe(lam=lam, global_lr=alpha / (lam * alpha + rho), local_rounds=1, inner_steps=0, **common)
    pfedme = simulation(step, rounds=1, participation=1.0)
    for run in (flame, pfedme):
        run.run()
    w_i = torch.stack([flame.store.get(i).w_i for i in range(6)])
    torch.testing.assert_close(w_i.mean(0), pfedme.server.w, rtol=1e-12, atol=1e-14)
    for i in range(6):
        assert torch.equal(flame.store.get(i).theta, pfedme.store.get(i).theta)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize(
    ("plain", "projected"),
    [
        (Flame(lam=0.7, rho=0.2, lr=0.05, batch=4), FlameLpProj(lam=0.7, rho=0.2, lr=0.05, batch=4, d_sub=10**6)),
        (
            PFedMe(lam=0.7, global_lr=0.3, local_rounds=3, lr=0.05, batch=4),
            LpProj(lam=0.7, global_lr=0.3, local_rounds=3, lr=0.05, batch=4, d_sub=10**6),
        ),
    ],
)
def test_a_projection_that_loses_nothing_changes_no_personal_model(plain, projected, mode: str) -> None:
    first, second = (simulation(algorithm, mode=mode, rounds=4) for algorithm in (plain, projected))
    for run in (first, second):
        run.run()
    for i in range(6):
        torch.testing.assert_close(first.store.get(i).theta, second.store.get(i).theta, rtol=1e-9, atol=1e-12)
    assert second.algorithm.global_model(second.server) is None


def test_lemma_3_in_the_projection() -> None:
    algorithm = FlameLpProj(lam=0.7, rho=0.3, lr=0.05, batch=4, d_sub=11)
    run = simulation(algorithm, rounds=5, participation=2)
    run.run()
    assert run.schema.parameters_shared == 11
    for i in range(6):
        state = run.store.get(i)
        seen = algorithm.seen(state.theta, run.schedule.seed)
        torch.testing.assert_close(state.pi, 0.7 / 6 * (seen - state.w_i))


def test_pfedme_reaches_the_same_point_by_gradient_steps(problem: LeastSquares) -> None:
    """Its stationary point is FLAME's: both minimise the mean of the Moreau envelopes."""
    lam = 0.8
    algorithm = PFedMe(
        lam=lam, global_lr=0.2, local_rounds=2, inner_steps=60, lr=1 / (problem.smoothness() + lam), batch=FULL
    )
    run = least_squares(problem, algorithm, rounds=10)
    envelopes = [
        lam * (np.eye(problem.features) - lam * np.linalg.inv(problem.hessian(i) + lam * np.eye(problem.features)))
        for i in range(M)
    ]
    w = np.zeros(problem.features)
    for _ in range(10):  # two gradient steps on each client's envelope, then the mean
        ends = []
        for i in range(M):
            w_i = w
            for _ in range(2):
                w_i = w_i - 0.2 * envelopes[i] @ (w_i - problem.local(i))
            ends.append(w_i)
        w = np.mean(ends, axis=0)
    np.testing.assert_allclose(run.server.w.numpy(), w, rtol=1e-6)


class TestInexactness:
    """Eqs. 17 and 18."""

    LAM, RHO, NU = 1.0, 10 / M, 0.8

    def algorithm(self, p: LeastSquares, **settings) -> Flame:
        rate = 0.5 / (p.smoothness() + self.LAM)
        return Flame(lam=self.LAM, rho=self.RHO, nu=self.NU, epsilon=1e-2, most_epochs=500, lr=rate, batch=FULL)

    def test_every_client_stops_as_soon_as_it_is_near_enough(self, problem: LeastSquares) -> None:
        before = [None] * M
        for run in rounds(problem, self.algorithm(problem), 12, participation=0.5):
            taken = run.sample(run.done)
            for i in range(M):
                state = run.store.get(i)
                if i in taken:
                    w_i = torch.zeros(problem.features).double() if before[i] is None else before[i].w_i
                    epsilon = 1e-2 if before[i] is None else float(before[i].epsilon)
                    assert float(state.epsilon) == pytest.approx(self.NU * epsilon)
                    slope = problem.hessian(i) @ state.theta.numpy() - problem.right(i)
                    slope += self.LAM * (state.theta - w_i).numpy()
                    assert np.sum((slope / M) ** 2) <= float(state.epsilon)
                elif before[i] is not None:
                    assert float(state.epsilon) == float(before[i].epsilon)
                before[i] = state

    @pytest.mark.slow
    @pytest.mark.parametrize("participation", [1.0, 0.5])
    def test_the_lyapunov_function_falls(self, problem: LeastSquares, participation: float) -> None:
        """L + sum c epsilon_i, c = nu / ((1 - nu) lam alpha): what a solution lacks is paid by the fall of epsilon."""
        c = self.NU / (1 - self.NU) / (self.LAM / M)
        values = []
        for run in rounds(problem, self.algorithm(problem), 25, participation=participation):
            slack = sum(float(run.store.get(i).epsilon) for i in range(M))
            values.append(lagrangian(problem, run) + c * slack)
        assert (np.diff(values) <= 1e-12).all()
        assert values[-1] < values[0]

    @pytest.mark.slow
    def test_it_ends_at_the_closed_form(self, problem: LeastSquares) -> None:
        algorithm = self.algorithm(problem).model_copy(update={"rho": 3 * self.LAM / M})
        run = least_squares(problem, algorithm, rounds=150)
        np.testing.assert_allclose(run.server.w.numpy(), closed_form(problem, self.LAM)[0], rtol=1e-4)

    @pytest.mark.slow
    def test_stacked_or_not_is_the_same(self) -> None:
        algorithm = Flame(lr=0.1, batch=4, epsilon=1e-3, nu=0.7, most_epochs=5)
        runs = [simulation(algorithm, mode=mode, rounds=4) for mode in ("threads", "stacked")]
        for run in runs:
            run.run()
        assert runs[0].counters.gradient_samples == runs[1].counters.gradient_samples
        for i in range(6):
            for name, t in runs[0].store.get(i).items():
                torch.testing.assert_close(t, runs[1].store.get(i)[name], rtol=1e-8, atol=1e-10)


def test_where_rho_is_lam_alpha_the_message_is_the_personal_model() -> None:
    """So it is in the paper's Table III: 10 clients, lam = 1, rho = 0.1."""
    run = simulation(Flame(lam=0.9, rho=0.9 / 6, lr=0.05, epochs=2, batch=4), rounds=5, participation=2)
    run.run()
    theta = torch.stack([run.store.get(i).theta for i in range(6)])
    torch.testing.assert_close(torch.stack([run.store.get(i)["sent.u"] for i in range(6)]), theta)
    torch.testing.assert_close(run.server.w, theta.mean(0))


def test_a_dual_needs_a_penalty() -> None:
    from equipoise.errors import EquipoiseError

    with pytest.raises(EquipoiseError, match="dual = false"):
        FedADMM(rho=0.0)


def test_moreau_envelopes_fall_between_local_and_pooled(problem: LeastSquares) -> None:
    """lam = 0 would be local training, an infinite one agreement: in between, the spread shrinks as lam grows."""
    spreads = []
    for lam in (1e-3, 1e-1, 10.0, 1e3):
        _, theta = closed_form(problem, lam)
        spreads.append(math.sqrt(np.var(theta, axis=0).sum()))
    assert sorted(spreads, reverse=True) == spreads
