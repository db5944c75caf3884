"""FedALA and FedFomo: clients begin to train with mixtures that they choose themselves."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.algorithms import FedALA, FedAvg, FedFomo, Local
from equipoise.algorithms.local_data import Start
from equipoise.data.federation import from_clients
from equipoise.engine.simulation import Simulation
from equipoise.runs.result import Result
from equipoise.state import RoundUploads, State, Upload
from tests.support.problems import FULL, LeastSquares, classification, linear_module, simulation

COMMON: dict[str, Any] = {"lr": 0.05, "epochs": 2, "batch": 4}


def finished(algorithm: Any, *given: Any, **options: Any) -> Simulation:
    run = simulation(algorithm, *given, **{"rounds": 3, **options})
    run.run()
    return run


# FedALA


@pytest.mark.parametrize("settings", [{"eta": 0.0}, {"p": 0}])
def test_fedala_without_weights_to_learn_is_fedavg(settings: dict) -> None:
    ala, avg = finished(FedALA(**settings, **COMMON)), finished(FedAvg(**COMMON))
    assert torch.equal(ala.server.theta, avg.server.w)
    assert ala.counters.gradient_samples == avg.counters.gradient_samples
    assert ala.schema.client["W"][0] == ((27,) if "eta" in settings else (0,))


def test_with_weights_zero_everywhere_fedala_is_local() -> None:
    class Closed(FedALA):
        def init_client(self, start: Start) -> State:
            state = super().init_client(start)
            return State(state, W=torch.zeros_like(state.W))

    ala, local = finished(Closed(eta=0.0, p=99, **COMMON)), finished(Local(**COMMON))
    assert all(torch.equal(ala.store.get(i).theta, local.store.get(i).v) for i in range(6))


def test_the_last_layers_are_counted_from_the_output() -> None:
    space = simulation(FedALA()).task.space
    assert torch.equal(FedALA(p=1)._upper(space), space.mask("head"))
    assert FedALA(p=2)._upper(space).all()
    assert not FedALA(p=0)._upper(space).any()


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_one_step_of_fedalas_weights_is_the_papers(problem: LeastSquares, mode: str) -> None:
    """The mixture moves as its weights would: W = clip(1 - eta gradient * (theta - theta_i), 0, 1)."""
    p, eta = problem, 0.4
    algorithm = FedALA(eta=eta, portion=1.0, most_passes=1, lr=0.1, batch=FULL)
    run = simulation(algorithm, p.federation(), linear_module(3), loss="squared", mode=mode, participation=1.0)
    run.advance()
    theta = run.server.theta.numpy()
    before = [run.store.get(i) for i in range(4)]
    assert all(float(each.begun) == 0 for each in before)  # in the first round there was nothing to mix
    run.advance()
    run.close()
    moved = 0
    for i in range(4):
        apart = theta - before[i].theta.numpy()
        W = np.clip(1 - eta * (p.hessian(i) @ theta - p.right(i)) * apart, 0, 1)
        moved += int(((W > 0) & (W < 1)).sum())
        start = before[i].theta.numpy() + W * apart
        after = run.store.get(i)
        np.testing.assert_allclose(after.W.numpy(), W, rtol=1e-9)
        np.testing.assert_allclose(after.theta.numpy(), start - 0.1 * (p.hessian(i) @ start - p.right(i)), rtol=1e-9)
        assert float(after.begun) == 1
    assert moved > 2


def test_what_fedala_begins_with_lies_between_the_two_models() -> None:
    run = finished(FedALA(eta=50.0, predict="start", **COMMON), participation=1.0)
    upper, result = run.algorithm._upper(run.task.space), Result(run)
    open_ = []
    for i in range(6):
        start, own, common = result.personal_vector(i).vector, run.store.get(i).theta, run.server.theta
        assert torch.equal(start[~upper], common[~upper])
        assert (start >= torch.minimum(own, common)).all()
        assert (start <= torch.maximum(own, common)).all()
        open_.append(float((start != common)[upper].double().mean()))
    assert max(open_) > 0.1


class Passes:
    """A client's data whose loss falls from pass to pass, and then stays."""

    def __init__(self, space: Any, losses: list[float]):
        self.space, self.losses, self.walks = space, losses, []

    def walk(self, start: State, step: Any, *, active: Tensor, **_: Any) -> State:
        self.walks.append(bool(active))
        return start

    def loss(self, v: Tensor) -> Tensor:
        return torch.tensor([self.losses[len(self.walks) - 1]], dtype=torch.float64)


def test_fedala_learns_until_the_loss_has_settled_and_later_in_one_pass() -> None:
    run = simulation(FedALA())
    theta = run.task.w0
    falling = [1.0 / (k + 1) for k in range(20)] + [0.01] * 80
    for algorithm, begun, passes in (
        (FedALA(threshold=10.0), 0, 11),
        (FedALA(threshold=1e-9), 0, 30),
        (FedALA(threshold=1e-9, settled_passes=4), 0, 24),
        (FedALA(threshold=1e-9, most_passes=7), 0, 7),
        (FedALA(threshold=1e-9), 1, 1),
    ):
        data = Passes(run.task.space, falling)
        client = State(algorithm.init_client(run.start), begun=torch.tensor([float(begun)]))
        algorithm._start(client, State(theta=theta + 1), data)  # type: ignore[arg-type]
        assert data.walks == [True] * passes
    run.close()


# FedFomo


class Bowl:
    """A client's data whose loss is the squared distance from a point."""

    def __init__(self, best: list[float]):
        self.best = torch.tensor(best).double()

    def loss(self, v: Tensor, *, of: str) -> Tensor:
        assert of == "validation"
        return (v - self.best).square().sum(-1, keepdim=True)


def mixed(own: list[float], rho: list[float], others: list[list[float]], known: list[float] | None = None) -> Any:
    client = State(theta=torch.tensor(own).double(), rho=torch.tensor(rho).double())
    ones = torch.ones(len(others)) if known is None else torch.tensor(known)
    down = State(theta=torch.tensor(others).double().reshape(-1, 2), known=ones.double())
    return FedFomo()._mixed(client, down, Bowl([1.0, 0.0]))  # type: ignore[arg-type]


def test_fedfomos_weights_and_mixture_are_the_papers() -> None:
    own, rho, others = [0.5, 0.0], [0.0, 1.0], [[1.0, 0.5], [0.0, 2.0], [0.0, 1.0]]
    start, w = mixed(own, rho, others)
    loss = lambda v: (v[0] - 1) ** 2 + v[1] ** 2  # noqa: E731
    expected = [(loss(rho) - loss(v)) / np.hypot(v[0] - rho[0], v[1] - rho[1]) for v in (*others[:2], own)]
    np.testing.assert_allclose(w.numpy(), [*expected[:2], 0.0])  # the last one is rho itself
    assert expected[1] < 0
    share = np.array([expected[0], expected[2]]) / (expected[0] + expected[2])
    np.testing.assert_allclose(start.numpy(), share @ np.array([others[0], own]))


def test_candidates_that_are_worse_or_not_there_or_not_finite_change_nothing() -> None:
    own, rho, good = [0.5, 0.0], [0.0, 1.0], [1.0, 0.5]
    start, _ = mixed(own, rho, [good])
    assert torch.equal(mixed(own, rho, [good, [0.0, 2.0]])[0], start)
    assert torch.equal(mixed(own, rho, [good, [1.0, 0.1]], known=[1.0, 0.0])[0], start)
    w = mixed(own, rho, [[1e200, 0.0]])[1]
    assert torch.equal(w, torch.zeros(1).double())
    worse = mixed([0.0, 3.0], rho, [[0.0, 2.0]])[0]
    assert torch.equal(worse, torch.tensor([0.0, 3.0]).double())  # nothing is better than rho: its own model


def with_validation(parts: int, same: bool) -> Any:
    x, y = (t.numpy() for t in classification().gather(torch.arange(60)))
    pieces = [slice(0, 20) if same else slice(10 * i, 10 * i + 20) for i in range(parts)]
    return from_clients([dict.fromkeys(("train", "validation", "test"), (x[s], y[s])) for s in pieces])


def test_fedfomo_among_equals_is_local() -> None:
    federation = with_validation(3, same=True)
    fomo, local = (finished(a(lr=0.1, batch=FULL), federation, participation=1.0, rounds=4) for a in (FedFomo, Local))
    for i in range(3):
        torch.testing.assert_close(fomo.store.get(i).theta, local.store.get(i).v, rtol=1e-12, atol=1e-14)


def test_fedfomo_in_a_run_adds_up_weights_and_sends_the_best() -> None:
    federation, algorithm = with_validation(5, same=False), FedFomo(M=2, epsilon=0.0, lr=0.1, batch=8)
    run = simulation(algorithm, federation, rounds=4, participation=3)
    A, sent = torch.eye(5).double(), []
    aggregate = run.aggregate

    def look(round: int, uploads: RoundUploads, names: Any) -> Any:
        for who, upload in zip(uploads.who, uploads.uploads, strict=True):
            for j, w_j in zip(algorithm._chosen(run.server, who), upload.message.w, strict=False):
                A[who, j] += w_j
                sent.append(who)
        return aggregate(round, uploads, names)

    run.aggregate = look  # type: ignore[method-assign]
    for round in range(1, 5):
        before = run.server.theta
        assert run.advance() or round == 4
        here = run.sample(round)
        for i in range(5):
            expected = run.store.get(i).theta if i in here else before[i]
            assert torch.equal(run.server.theta[i], expected)
    run.close()
    assert sent
    torch.testing.assert_close(run.server.A, A)
    heard = {j for j in range(5) if run.server.heard[j]}
    for i in range(5):
        best = sorted(heard - {i}, key=lambda j: (-float(A[i, j]), j))[:2]
        down = algorithm.broadcast(run.server, i)
        assert torch.equal(down.theta, run.server.theta[best])
        assert down.known.tolist() == [1.0, 1.0]


def table(**given: Any) -> State:
    """The server's state of six clients, all of whom were heard in the last of three rounds but the first two."""
    score = torch.arange(36).double().view(6, 6)
    heard = torch.tensor([0.0, 2, 3, 3, 3, 3]).double()
    rows = torch.arange(6).double()[:, None].expand(6, 4)
    return State(theta=rows, A=score, heard=heard, round=torch.tensor([3.0]), seed=torch.tensor([7]), **given)


def test_who_is_chosen() -> None:
    best = FedFomo(M=3, epsilon=0.0)
    assert best._chosen(table(), 5) == [4, 3, 2]
    assert best._chosen(table(), 0) == [5, 4, 3]
    assert FedFomo(M=9, epsilon=0.0)._chosen(table(), 2) == [5, 4, 3, 1]
    assert FedFomo(M=9, epsilon=0.0, absent=False)._chosen(table(), 2) == [5, 4, 3]
    assert best._chosen(State(table(), A=-table().A), 6) == [1, 2, 3]  # a newcomer: the largest sums of columns
    nobody = best.broadcast(State(table(), heard=torch.zeros(6)), 0)
    assert not nobody.known.any()
    some = FedFomo(M=9, epsilon=0.0).broadcast(table(), 0)  # as many as announced, whoever is there
    assert some.known.tolist() == [1.0] * 5 + [0.0] * 4
    assert some.theta[:5, 0].tolist() == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert nobody.theta.shape == (3, 4)


def test_random_choices_are_keyed_by_seed_round_and_client_and_fade_out() -> None:
    always = FedFomo(M=2, epsilon=1.0, epsilon_decay=0.0)

    def drawn(**changed: Any) -> list[tuple[int, ...]]:
        return [tuple(always._chosen(State(table(), **changed), i)) for i in range(6)]

    assert drawn() == drawn()
    for changed in ({"seed": torch.tensor([8])}, {"round": torch.tensor([4.0])}):
        assert drawn() != drawn(**changed)
    assert len({choice for choice in drawn() if 0 not in choice}) > 2
    assert all(i not in choice and len(set(choice)) == 2 for i, choice in enumerate(drawn()))
    faded = FedFomo(M=2, epsilon=0.3, epsilon_decay=0.1)  # 0.3 - 0.1 t is zero in the fourth round
    assert [faded._chosen(table(), i) for i in range(6)] == [
        FedFomo(M=2, epsilon=0.0)._chosen(table(), i) for i in range(6)
    ]


def test_newcomers_of_fedfomo_change_nothing() -> None:
    message = State(theta=torch.full((4,), 9.0).double(), w=torch.ones(3).double())
    after = FedFomo(M=3).aggregate(table(), RoundUploads((6,), (Upload(message),)), lambda u: u.mean())
    assert torch.equal(after.theta, table().theta)
    assert torch.equal(after.A, table().A)
