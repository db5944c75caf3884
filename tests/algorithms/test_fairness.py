"""q-FFL, AFL and TERM by their closed forms and limits."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.algorithms import AFL, QFFL, TERM, FedAvg
from equipoise.algorithms.afl import projection
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.schema import ShapeProbe
from equipoise.config.uploads import UploadSettings
from equipoise.reducers import Mean, Median, NormBound
from equipoise.state import RoundUploads, State, Upload, Uploads
from tests.support.problems import LeastSquares, linear_module, simulation

# What a server at w = 0 gets in the examples: w_k = -1 and -3, F_k = 1 and 2.
SENT = RoundUploads(
    (0, 1),
    tuple(Upload(State(w=torch.tensor([w]).double(), F=torch.tensor([F]).double())) for w, F in ((-1, 1), (-3, 2))),
)


def after(algorithm: Algorithm, **server: Tensor) -> State:
    """The server's state after the example, with the weights of the rule."""
    start = State(w=torch.zeros(1).double(), **server)
    return algorithm.aggregate(start, SENT, lambda uploads: uploads.combined(uploads.weights()))


@pytest.mark.parametrize(("q", "expected"), [(0.0, -2), (1.0, -0.0679611650), (2.0, -0.0337662338)])
def test_q_ffl_by_hand(q: float, expected: float) -> None:
    assert after(QFFL(q=q, lr=0.1)).w.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("t", "expected"), [(0.0, -2), (1.0, -2.4621171573), (-1.0, -1.5378828427), (10.0, -2.9999092043)]
)
def test_term_by_hand(t: float, expected: float) -> None:
    assert after(TERM(t=t)).w.item() == pytest.approx(expected, abs=1e-9)


def test_a_constant_on_all_losses_changes_nothing_for_term() -> None:
    more = [Upload(State(w=u.message.w, F=u.message.F + 900)) for u in SENT.items]
    found = TERM(t=3.0).aggregate(
        State(w=torch.zeros(1).double()),
        RoundUploads((0, 1), tuple(more)),
        lambda uploads: uploads.combined(uploads.weights()),
    )
    torch.testing.assert_close(found.w, after(TERM(t=3.0)).w)


def test_projection_onto_the_simplex() -> None:
    for y, expected in (((0.5, 0.8, -0.1), (0.35, 0.65, 0)), ((1.2, 0.15), (1, 0)), ((0.2, 0.2), (0.5, 0.5))):
        torch.testing.assert_close(projection(torch.tensor(y).double()), torch.tensor(expected).double())
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):  # the nearest point: no direction within the simplex makes an angle below 90 degrees with y - x
        y = 2 * torch.randn(5, generator=rng, dtype=torch.float64)
        x = projection(y)
        assert ((torch.eye(5).double() - x) @ (y - x)).max() <= 1e-12


def test_afl_steps_with_its_weights_and_then_moves_them() -> None:
    lam = torch.tensor([0.25, 0.75, 0.0]).double()
    found = after(AFL(lam_lr=0.1), lam=lam)
    assert found.w.item() == pytest.approx(-0.25 - 3 * 0.75)
    torch.testing.assert_close(found.lam, projection(lam + torch.tensor([0.1, 0.2, 0]).double()))
    assert lam.tolist() == [0.25, 0.75, 0.0]  # the state before is not changed
    absent = after(AFL(lam_lr=0.0), lam=torch.tensor([0.0, 0.0, 1.0]).double())
    assert absent.w.item() == 0  # the clients that count did not come
    assert absent.lam.tolist() == [0, 0, 1]


def final(algorithm: Algorithm, **options: object) -> State:
    run = simulation(algorithm, rounds=3, uploads=UploadSettings(reducer=Mean()), **options)  # type: ignore[arg-type]
    run.run()
    return run.server


SETTINGS = {"lr": 0.05, "batch": 4}


@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize("algorithm", [QFFL(q=0.0, **SETTINGS), TERM(t=0.0, **SETTINGS), AFL(lam_lr=0.0, **SETTINGS)])
def test_without_fairness_it_is_fedavg_with_equal_weights_to_the_last_bit(algorithm: Algorithm, mode: str) -> None:
    plain = simulation(FedAvg(**SETTINGS), rounds=3, mode=mode, uploads=UploadSettings(reducer=Mean()))
    plain.run()
    fair = simulation(algorithm, rounds=3, mode=mode)  # its weights are equal
    fair.run()
    assert torch.equal(fair.server.w, plain.server.w)


def test_small_settings_are_near_that_limit_and_the_limit_of_a_large_tilt_is_the_worst_client() -> None:
    zero = after(QFFL(q=0.0, lr=0.1)).w
    for q in (1e-3, 1e-4):
        assert abs((after(QFFL(q=q, lr=0.1)).w - zero).item()) < 100 * q  # a first-order term in q
    assert after(TERM(t=500.0)).w.item() == pytest.approx(-3)
    assert after(TERM(t=-500.0)).w.item() == pytest.approx(-1)


def problem_losses(problem: LeastSquares, w: np.ndarray) -> np.ndarray:
    return np.array([np.mean((x @ w - y) ** 2) for x, y in zip(problem.x, problem.y, strict=True)])


def gradient(problem: LeastSquares, weights: np.ndarray, w: np.ndarray) -> np.ndarray:
    return sum(p * (problem.hessian(i) @ w - problem.right(i)) for i, p in enumerate(weights))


def descended(problem: LeastSquares, algorithm: Algorithm, rounds: int) -> State:
    """The server's state after rounds in which every client takes one step on all samples, without a simulation."""
    n = problem.clients
    server = State(w=torch.zeros(3).double(), lam=torch.full((n,), 1 / n).double())
    server = State(server, w_mean=server.w, rounds=torch.zeros(1).double())
    for _ in range(rounds):
        w = server.w.numpy()
        sent = [
            Upload(State(w=torch.from_numpy(w - algorithm.lr * (problem.hessian(i) @ w - problem.right(i))), F=F[None]))
            for i, F in enumerate(torch.from_numpy(problem_losses(problem, w)))
        ]
        uploads = RoundUploads(tuple(range(n)), tuple(sent))
        server = State(server, **algorithm.aggregate(server, uploads, lambda each: each.combined(each.weights())))
    return server


def test_the_limits_are_stationary_points_of_the_papers_objectives(problem: LeastSquares) -> None:
    lr = 0.25 / problem.smoothness()
    w = descended(problem, QFFL(q=2.0, lr=lr), 1200).w.numpy()
    assert np.linalg.norm(gradient(problem, problem_losses(problem, w) ** 2, w)) < 1e-6
    w = descended(problem, TERM(t=0.7, lr=lr), 1200).w.numpy()
    assert np.linalg.norm(gradient(problem, np.exp(0.7 * problem_losses(problem, w)), w)) < 1e-6


def test_afl_lowers_the_worst_loss(problem: LeastSquares) -> None:
    lr = 0.1 / problem.smoothness()
    plain, agnostic = AFL(lam_lr=0.0, lr=lr), AFL(lam_lr=0.002, average="mean", lr=lr)
    ends = [descended(problem, algorithm, 800) for algorithm in (plain, agnostic)]
    reported = [plain.global_model(ends[0]), agnostic.global_model(ends[1])]
    assert reported[0] is ends[0].w
    assert reported[1] is ends[1].w_mean
    worst = [problem_losses(problem, w.numpy()).max() for w in reported]
    assert worst[1] < 0.97 * worst[0]
    assert ends[1].lam.sum().item() == pytest.approx(1)


def test_the_loss_of_a_vector_is_the_mean_over_all_samples(problem: LeastSquares) -> None:
    """Threaded and stacked; against numpy, and its differences against the full gradient."""
    seen: dict[str, list[float]] = {}

    class Probe(FedAvg):
        def local_update(self, client: State, down: State, data):  # type: ignore[no-untyped-def]
            if isinstance(data, ShapeProbe):
                return super().local_update(client, down, data)
            v = torch.full_like(down.w, 0.3)
            values = data.loss(v)
            assert values.shape == data.size.shape
            seen.setdefault(mode, []).extend(values.flatten().tolist())
            along = torch.arange(1.0, 4.0).double().expand_as(v)
            slope = (data.loss(v + 1e-4 * along) - data.loss(v - 1e-4 * along)) / 2e-4
            torch.testing.assert_close(slope, (data.full_gradient(v) * along).sum(-1, keepdim=True))
            return super().local_update(client, down, data)

    for mode in ("threads", "stacked"):
        simulation(
            Probe(), problem.federation(), linear_module(), loss="squared", mode=mode, rounds=1, participation=1.0
        ).run()
        np.testing.assert_allclose(sorted(seen[mode]), sorted(problem_losses(problem, np.full(3, 0.3))), rtol=1e-12)


@pytest.mark.parametrize("algorithm", [QFFL(q=1.0), TERM(t=1.0), AFL()])
def test_a_robust_rule_sees_the_models_and_not_the_losses(algorithm: Algorithm) -> None:
    seen: list[set[str]] = []

    def reduce(uploads: Uploads) -> State:
        seen.append(set(uploads.like))
        return Median()(uploads)

    algorithm.aggregate(State(w=torch.zeros(1).double(), lam=torch.full((2,), 0.5).double()), SENT, reduce)
    assert seen == [{"w"}]
    for rule in (NormBound(), Median()):
        simulation(algorithm, rounds=1, uploads=UploadSettings(reducer=rule)).run()


def test_a_forged_loss_below_zero_counts_as_zero() -> None:
    forged = (SENT.items[0], Upload(State(w=SENT.items[1].message.w, F=torch.tensor([-5.0]).double())))
    found = QFFL(q=2.0).aggregate(
        State(w=torch.zeros(1).double()), RoundUploads((0, 1), forged), lambda u: u.combined(u.weights())
    )
    assert math.isfinite(found.w.item())
    assert -1 <= found.w.item() <= 0
