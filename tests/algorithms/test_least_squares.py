"""Closed forms against numpy's least squares, and the limits of ridge regression."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equipoise.algorithms import LeastSquares
from equipoise.algorithms._ridge import eliminate, fitted, packed, solution, unpacked
from equipoise.attacks import SignFlip
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import Federation, RaggedIndices, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import Median
from equipoise.representations.head_moments import Moments
from equipoise.runs.result import Result
from equipoise.state import State
from tests.support.problems import classification, simulation, small_mlp

Pair = tuple[np.ndarray, np.ndarray]


def pairs(clients: int = 4, features: int = 3, outputs: int = 2, seed: int = 0, samples: int = 8) -> list[Pair]:
    """Clients whose true heads differ, with an offset, so that a bias matters."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(clients):
        x = rng.normal(size=(samples + 3 * i, features)) + 1
        found.append((x, x @ rng.normal(size=(features, outputs)) + 2 + 0.3 * rng.normal(size=(len(x), outputs))))
    return found


def federation(train: list[Pair], validation: list[Pair] | None = None) -> Federation:
    parts = [{"train": pair, "test": pair} for pair in train]
    for part, pair in zip(parts, validation or [], strict=False):
        part["validation"] = pair
    return from_clients(parts)


def module(features: int = 3, outputs: int = 2, bias: bool = False) -> nn.Module:
    torch.manual_seed(5)
    return BodyAndHead(nn.Identity(), nn.Linear(features, outputs, bias=bias))


def run(algorithm: LeastSquares, clients: Federation, net: nn.Module, **options: Any) -> Simulation:
    options = {"rounds": 1, "participation": 1.0, "loss": "squared", **options}
    found = simulation(algorithm, clients, net, **options)
    found.run()
    return found


def personal(done: Simulation, who: int) -> np.ndarray:
    """A client's head as a matrix, the bias its last row."""
    return matrix(Result(done).personal(who))


def pooled(done: Simulation) -> np.ndarray:
    return matrix(Result(done).global_model())


def matrix(net: nn.Module) -> np.ndarray:
    rows = [net.head.weight.detach().T]  # type: ignore[union-attr, operator]
    if net.head.bias is not None:  # type: ignore[union-attr]
        rows.append(net.head.bias.detach()[None])  # type: ignore[union-attr, operator, index]
    return torch.cat(rows).double().numpy()


def with_ones(x: np.ndarray, bias: bool) -> np.ndarray:
    return np.hstack([x, np.ones((len(x), 1))]) if bias else x


def lstsq(pair: Pair, bias: bool = False) -> np.ndarray:
    return np.linalg.lstsq(with_ones(pair[0], bias), pair[1], rcond=None)[0]


def together(clients: list[Pair]) -> Pair:
    return np.concatenate([x for x, _ in clients]), np.concatenate([y for _, y in clients])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_without_ridge_it_is_least_squares_of_each_client_and_of_all(bias: bool, mode: str) -> None:
    clients = pairs()
    done = run(LeastSquares(), federation(clients), module(bias=bias), mode=mode)
    for who, pair in enumerate(clients):
        np.testing.assert_allclose(personal(done, who), lstsq(pair, bias), rtol=1e-9)
    np.testing.assert_allclose(pooled(done), lstsq(together(clients), bias), rtol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
def test_ridge_towards_the_pooled_head_is_its_normal_equations(bias: bool) -> None:
    clients, r = pairs(), 0.3
    done = run(LeastSquares(ridge=r), federation(clients), module(bias=bias))
    w = pooled(done)
    for who, (x, y) in enumerate(clients):
        X = with_ones(x, bias)
        v = np.linalg.solve(X.T @ X + r * len(X) * np.eye(X.shape[1]), X.T @ y + r * len(X) * w)
        np.testing.assert_allclose(personal(done, who), v, rtol=1e-9)


def test_towards_zero_the_bias_is_not_penalised() -> None:
    clients, r = pairs(), 0.7
    alone = run(LeastSquares(towards="zero", ridge=r), federation(clients), module(bias=True))
    for who, (x, y) in enumerate(clients):
        X = with_ones(x, True)
        v = np.linalg.solve(X.T @ X + r * len(X) * np.diag([1, 1, 1, 0]), X.T @ y)
        np.testing.assert_allclose(personal(alone, who), v, rtol=1e-9)
    flat = run(LeastSquares(towards="zero", ridge=1e12), federation(clients), module(bias=True))
    np.testing.assert_allclose(personal(flat, 0)[:-1], 0, atol=1e-9)
    np.testing.assert_allclose(personal(flat, 0)[-1], clients[0][1].mean(0), rtol=1e-9)
    x, y = together(clients)
    X = with_ones(x, True)
    w = np.linalg.solve(X.T @ X + r * len(X) * np.diag([1, 1, 1, 0]), X.T @ y)
    one = run(LeastSquares(pooled_ridge=r), federation(clients), module(bias=True))
    np.testing.assert_allclose(pooled(one), w, rtol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
def test_the_path_goes_from_own_to_pooled(bias: bool) -> None:
    """The distance to the pooled head never grows with r, and both ends are reached."""
    clients, gaps = pairs(), []
    for r in (0.0, 1e-12, 1e-3, 1e-2, 0.1, 1.0, 10.0, 1e12):
        done = run(LeastSquares(ridge=r), federation(clients), module(bias=bias))
        gaps.append(np.linalg.norm(personal(done, 0) - pooled(done)))
        if r == 1e-12:
            np.testing.assert_allclose(personal(done, 0), lstsq(clients[0], bias), rtol=1e-8)
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-8)
    assert all(after < before for before, after in pairwise(gaps[1:]))
    assert gaps[-1] < 1e-9


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 12), st.floats(0, 1e6))
@settings(max_examples=60)
def test_shrinkage_is_monotone_and_nothing_fits_better(
    seed: int, features: int, outputs: int, samples: int, r: float
) -> None:
    """For any number of samples, from none to more than there are coefficients."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(samples, features)), rng.normal(size=(samples, outputs))
    w = rng.normal(size=(features, outputs))
    m, target = Moments.of(torch.from_numpy(x), torch.from_numpy(y), [slice(None)]), torch.from_numpy(w)

    def at(r: float) -> np.ndarray:
        return fitted(m, [r], None, bias=False, towards=target).numpy()

    gaps = [float(np.linalg.norm(at(each) - w)) for each in (r, 2 * r + 0.1)]
    assert gaps[1] <= gaps[0] * (1 + 1e-9) + 1e-9

    def loss(v: np.ndarray) -> float:
        return float(np.sum((x @ v - y) ** 2) + r * samples * np.sum((v - w) ** 2))

    best = loss(at(r))
    assert best <= loss(at(r) + 1e-3 * rng.normal(size=w.shape)) * (1 + 1e-9) + 1e-9
    nearest = w + np.linalg.lstsq(x, y - x @ w, rcond=None)[0] if samples else w
    if samples and np.linalg.cond(x) < 1e5:
        np.testing.assert_allclose(at(0.0), nearest, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("towards", ["zero", "pooled"])
def test_too_few_samples_give_the_nearest_solution(towards: str) -> None:
    """One client has two samples for five coefficients, and one feature is the copy of another."""
    clients = pairs(features=5)
    clients = [(np.hstack([x[:, :4], x[:, :1]]), y) for x, y in clients]
    clients[0] = clients[0][0][:2], clients[0][1][:2]
    done = run(LeastSquares(towards=towards), federation(clients), module(5))
    w = pooled(done) if towards == "pooled" else np.zeros((5, 2))
    for who, (x, y) in enumerate(clients):
        expected = w + np.linalg.pinv(x, rcond=1e-8) @ (y - x @ w)
        np.testing.assert_allclose(personal(done, who), expected, rtol=1e-7, atol=1e-8)
    if towards == "pooled":
        x, y = together(clients)
        np.testing.assert_allclose(w, np.linalg.pinv(x, rcond=1e-8) @ y, rtol=1e-8)


def test_of_no_samples_the_head_is_the_one_that_others_have() -> None:
    none, w = Moments.none(3, 2, like=torch.zeros(1)), torch.randn(3, 2).double()
    for r in (0.0, 1.0):
        assert torch.equal(fitted(none, [r], None, bias=True, towards=w), w)
        assert not fitted(none, [r], None, bias=True).any()


def test_one_client_is_all_clients() -> None:
    for ridge in (0.0, 0.5):
        done = run(LeastSquares(ridge=ridge), federation(pairs(1)), module(bias=True))
        np.testing.assert_allclose(personal(done, 0), pooled(done), rtol=1e-9)


def test_without_ridge_predictions_do_not_depend_on_the_basis_of_the_inputs() -> None:
    clients, A = pairs(), np.random.default_rng(1).normal(size=(3, 3))
    turned = [(x @ A, y) for x, y in clients]
    one, two = (run(LeastSquares(), federation(each), module()) for each in (clients, turned))
    for who, (x, _) in enumerate(clients):
        np.testing.assert_allclose(x @ A @ personal(two, who), x @ personal(one, who), rtol=1e-8)
        np.testing.assert_allclose(x @ A @ pooled(two), x @ pooled(one), rtol=1e-8)


def test_the_order_of_samples_does_not_matter() -> None:
    clients = pairs()
    mixed = [(x[order], y[order]) for x, y in clients for order in [np.random.default_rng(2).permutation(len(x))]]
    one, two = (run(LeastSquares(ridge=0.1), federation(each), module()) for each in (clients, mixed))
    for who in range(4):
        np.testing.assert_allclose(personal(one, who), personal(two, who), rtol=1e-10)


@pytest.mark.parametrize("towards", ["zero", "pooled"])
@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_each_client_chooses_on_its_validation_samples(towards: str, mode: str) -> None:
    clients, judges = pairs(), pairs(3, seed=1)  # the last client has none, and takes the first value
    grid = (0.5, 0.0, 0.01, 0.1, 3.0)
    algorithm = LeastSquares(towards=towards, ridge="validation", grid=grid)
    done = run(algorithm, federation(clients, judges), module(bias=True), mode=mode)
    each = [run(LeastSquares(towards=towards, ridge=r), federation(clients), module(bias=True)) for r in grid]
    for who in range(4):
        heads = [personal(other, who) for other in each]
        best = 0
        if who < 3:
            x, y = judges[who]
            best = int(np.argmin([np.sum((with_ones(x, True) @ v - y) ** 2) for v in heads]))
        np.testing.assert_allclose(personal(done, who), heads[best], rtol=1e-9)


@pytest.mark.parametrize("towards", ["zero", "pooled"])
@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_a_refit_has_the_chosen_strength_and_all_samples(towards: str, mode: str) -> None:
    """The strength is that of the same run without a refit, and so is the pooled head; the fit is to both parts."""
    clients, judges, grid = pairs(), pairs(3, seed=1), (0.5, 0.0, 0.01, 0.1, 3.0)  # the last client has no validation
    settings = {"towards": towards, "ridge": "validation", "grid": grid}
    done = run(LeastSquares(**settings, refit=True), federation(clients, judges), module(), mode=mode)
    before = run(LeastSquares(**settings), federation(clients, judges), module())
    w = pooled(before) if towards == "pooled" else np.zeros((3, 2))
    if towards == "pooled":
        np.testing.assert_allclose(pooled(done), w, rtol=1e-12)

    def head(pair: Pair, r: float) -> np.ndarray:
        x, y = pair
        return np.linalg.solve(x.T @ x + r * len(x) * np.eye(3), x.T @ y + r * len(x) * w)

    for who, pair in enumerate(clients):
        [r] = [r for r in grid if np.allclose(personal(before, who), head(pair, r), rtol=1e-9)]
        both = together([pair, *judges[who : who + 1]])
        np.testing.assert_allclose(personal(done, who), head(both, r), rtol=1e-9)


def test_the_server_chooses_on_all_validation_samples() -> None:
    clients, judges = pairs(6, samples=4), pairs(6, seed=1)
    grid = (0.0, 0.01, 0.1, 1.0)
    done = run(LeastSquares(pooled_ridge="validation", grid=grid), federation(clients, judges), module())
    heads = [pooled(run(LeastSquares(pooled_ridge=r), federation(clients), module())) for r in grid]
    x, y = together(judges)
    best = int(np.argmin([np.sum((x @ w - y) ** 2) for w in heads]))
    np.testing.assert_allclose(pooled(done), heads[best], rtol=1e-9)
    assert set(done.schema.up) == {"n", "xx", "xy", "judge_xx", "judge_xy"}


def test_what_is_sent() -> None:
    """Half of X'X, X'Y and n; towards zero nothing, and there is no pooled model."""
    net = module(7, 2, bias=True)
    clients = federation(pairs(features=7))
    done = run(LeastSquares(), clients, net)
    assert {name: shape for name, (shape, _) in done.schema.up.items()} == {"n": (1,), "xx": (36,), "xy": (8, 2)}
    assert set(done.schema.down) == {"w"}
    alone = run(LeastSquares(towards="zero"), clients, net)
    assert alone.counters.bytes_up == alone.counters.bytes_down == 0
    assert alone.algorithm.global_model(alone.server) is None


@pytest.mark.parametrize("participation", [1, 2])
def test_all_clients_count_once_all_have_taken_part(participation: int) -> None:
    clients = pairs()
    done = run(LeastSquares(), federation(clients), module(), rounds=30, participation=participation)
    np.testing.assert_allclose(pooled(done), lstsq(together(clients)), rtol=1e-9)


def test_personal_heads_need_no_part_in_training_and_unseen_clients_have_theirs() -> None:
    clients = pairs()
    few = run(LeastSquares(towards="zero"), federation(clients), module(), participation=1)
    for who, pair in enumerate(clients):
        np.testing.assert_allclose(personal(few, who), lstsq(pair), rtol=1e-9)
    held = federation(clients).holding_out(0.25, 0)
    done = run(LeastSquares(ridge=0.4), held, module())
    [unseen] = [k for k, name in enumerate(held.names) if k not in held.by_name[0]]
    x, y = clients[unseen]
    w = lstsq(together([pair for k, pair in enumerate(clients) if k != unseen]))
    np.testing.assert_allclose(pooled(done), w, rtol=1e-9)
    v = np.linalg.solve(x.T @ x + 0.4 * len(x) * np.eye(3), x.T @ y + 0.4 * len(x) * w)
    np.testing.assert_allclose(personal(done, unseen), v, rtol=1e-9)


def test_in_single_precision_normal_equations_keep_double() -> None:
    """Columns that are almost parallel: in float32, X'X alone would lose them."""
    rng = np.random.default_rng(0)
    t = np.linspace(0, 1, 40).astype(np.float32).astype(float)
    x = np.stack([t**k for k in range(6)], axis=1).astype(np.float32).astype(float)
    y = (x @ rng.normal(size=(6, 1))).astype(np.float32).astype(float)
    done = run(LeastSquares(), federation([(x, y)] * 2), module(6, 1), dtype="float32")
    assert np.linalg.cond(x) > 1e3
    np.testing.assert_allclose(personal(done, 0), lstsq((x, y)), rtol=1e-5)
    np.testing.assert_allclose(pooled(done), lstsq((x, y)), rtol=1e-5)


def test_the_body_stays_as_it_began() -> None:
    done = simulation(LeastSquares(ridge=0.1), participation=1.0, rounds=2)
    done.run()
    space, start = done.task.space, done.task.w0
    for vector in (Result(done).personal_vector(2).vector, done.algorithm.global_model(done.server)):
        assert torch.equal(space.body(vector), space.body(start))
    x, y = done.federation.gather(torch.from_numpy(done.federation.train[5]))
    body = done.task.to_module(start).body
    features = with_ones(body(x).detach().numpy(), True)
    own = simulation(LeastSquares(towards="zero"), participation=1.0, rounds=1)
    own.run()
    expected = np.linalg.lstsq(features, np.eye(3)[y], rcond=None)[0]  # 1 for the right class
    np.testing.assert_allclose(personal(own, 5), expected, rtol=1e-6)


@pytest.mark.parametrize("where", ["local", "central"])
def test_moments_can_be_private(where: str) -> None:
    """Noise makes X'X indefinite; directions with negative eigenvalues are not used."""
    uploads = UploadSettings(privacy=Privacy(clip=1.0, sigma=0.5, where=where))
    done = run(LeastSquares(ridge=0.1), federation(pairs()), module(), uploads=uploads)
    assert done.server.finite()
    exact = UploadSettings(privacy=Privacy(clip=1e9, sigma=1e-9, where=where))
    done = run(LeastSquares(), federation(pairs()), module(), uploads=exact)
    np.testing.assert_allclose(pooled(done), lstsq(together(pairs())), rtol=1e-6)


def test_a_robust_rule_sees_the_moments() -> None:
    clients = [pairs(1, samples=20)[0]] * 5
    attack = SignFlip(clients=("client-1", "client-3"))
    uploads = UploadSettings(attack=attack, reducer=Median())
    done = run(LeastSquares(), federation(clients), module(), uploads=uploads)
    np.testing.assert_allclose(pooled(done), lstsq(clients[0]), rtol=1e-9)


def test_a_client_without_samples_of_one_split_changes_nothing_for_others() -> None:
    whole = federation(pairs(), pairs(seed=1))
    fewer = replace(whole, validation=RaggedIndices([[], *(whole.validation[k] for k in range(1, 4))]))
    algorithm = LeastSquares(ridge="validation", grid=(0.3, 0.0, 1.0))
    one, two = (run(algorithm, each, module()) for each in (whole, fewer))
    for who in range(1, 4):
        np.testing.assert_array_equal(personal(one, who), personal(two, who))


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(EquipoiseError, match=r"pooled_ridge = 0.1 has no effect with algorithm.towards = 'zero'"):
        LeastSquares(towards="zero", pooled_ridge=0.1)
    with pytest.raises(EquipoiseError, match="ridge = -1 is not allowed"):
        LeastSquares(ridge=-1)
    with pytest.raises(EquipoiseError, match="validation samples"):
        simulation(LeastSquares(ridge="validation"), federation(pairs()), module(), loss="squared")


def test_sending_nothing_is_no_trap(recwarn: pytest.WarningsRecorder, tmp_path: Path) -> None:
    run(LeastSquares(towards="zero"), federation(pairs()), module(), folder=tmp_path / "run")
    assert "nothing is shared" not in (tmp_path / "run" / "summary.json").read_text()
    assert not recwarn.list


# The algebra.


@given(st.integers(0, 10**6), st.integers(1, 7), st.data())
@settings(max_examples=60)
def test_elimination_leaves_the_least_squares_of_all_coefficients(seed: int, size: int, data: st.DataObject) -> None:
    """Whatever is kept, even nothing or everything: solving what remains and completing it is solving the whole."""
    kept = data.draw(st.lists(st.integers(0, size - 1), unique=True).map(sorted))
    rng = np.random.default_rng(seed)
    x, y = torch.from_numpy(rng.normal(size=(2 * size + 3, size))), torch.from_numpy(rng.normal(size=(2 * size + 3, 2)))
    reduced = eliminate(x.T @ x, x.T @ y, kept)
    v = reduced.completed(solution(reduced.xx, reduced.xy))
    expected = torch.linalg.lstsq(x, y).solution
    torch.testing.assert_close(v, expected, rtol=1e-6, atol=1e-8)


def test_a_triangle_is_the_whole_matrix() -> None:
    xx = torch.randn(2, 3, 4, 4).double()
    xx = xx + xx.mT
    assert packed(xx).shape == (2, 3, 10)
    assert torch.equal(unpacked(packed(xx), 4), xx)


def test_what_is_not_finite_stays_so() -> None:
    xx, xy = torch.eye(3).double(), torch.ones(3, 1).double()
    bad = xx.clone()
    bad[0, 0] = torch.nan
    assert not State(v=solution(bad, xy)).finite()
    both = solution(torch.stack([bad, xx]), torch.stack([xy, xy]))
    assert torch.equal(both[1], xy)
    assert both[0].isnan().all()


def test_classes_and_a_network_run_as_for_all_methods() -> None:
    done = simulation(LeastSquares(ridge="validation"), classification(), small_mlp(), rounds=2)
    done.run()
    assert done.counters.gradient_samples == 0
    assert done.lines[-1]["personal"]["accuracy"] > 0.3
