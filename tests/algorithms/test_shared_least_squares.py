"""Shared least squares against one least squares of all clients' samples in one place."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.algorithms import LeastSquares, SharedLeastSquares
from equipoise.config.experiment import Experiment
from equipoise.data.sources.polynomial import Polynomial
from equipoise.errors import EquipoiseError
from equipoise.runs.result import Result
from tests.algorithms.test_least_squares import Pair, federation, lstsq, module, pairs, personal, run, with_ones
from tests.support.problems import simulation


def central(clients: list[Pair], shared: list[int], bias: bool = False) -> list[np.ndarray]:
    """Solve one large least squares: shared coefficients have one column, each other one a column per client."""
    xs = [with_ones(x, bias) for x, _ in clients]
    size = xs[0].shape[1]
    own = [k for k in range(size) if k not in shared]
    rows = []
    for i, x in enumerate(xs):
        blocks = [x[:, own] if j == i else np.zeros((len(x), len(own))) for j in range(len(xs))]
        rows.append(np.hstack([x[:, shared], *blocks]))
    a = np.linalg.lstsq(np.concatenate(rows), np.concatenate([y for _, y in clients]), rcond=None)[0]
    heads = []
    for i in range(len(xs)):
        v = np.empty((size, a.shape[1]))
        v[shared] = a[: len(shared)]
        v[own] = a[len(shared) + i * len(own) : len(shared) + (i + 1) * len(own)]
        heads.append(v)
    return heads


@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shared", [(), (1,), (2, 0), (0, 1, 2), ("bias",), (1, "bias"), (0, 1, 2, "bias")])
def test_it_is_the_least_squares_of_all_together(shared: tuple[int | str, ...], bias: bool, mode: str) -> None:
    if "bias" in shared and not bias:
        shared = tuple(k for k in shared if k != "bias")
    clients = pairs()
    done = run(SharedLeastSquares(shared=shared), federation(clients), module(bias=bias), mode=mode)
    expected = central(clients, sorted(3 if k == "bias" else int(k) for k in shared), bias)
    for who in range(4):
        np.testing.assert_allclose(personal(done, who), expected[who], rtol=1e-10, atol=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5), st.data())
@settings(max_examples=15)
def test_whatever_is_shared(seed: int, features: int, clients: int, data: st.DataObject) -> None:
    shared = data.draw(st.lists(st.integers(0, features - 1), unique=True))
    each = pairs(clients, features, 1, seed, samples=features + 4)
    done = run(SharedLeastSquares(shared=tuple(shared)), federation(each), module(features, 1))
    expected = central(each, sorted(shared))
    for who in range(clients):
        np.testing.assert_allclose(personal(done, who), expected[who], rtol=1e-7, atol=1e-8)


def test_nothing_shared_is_local_and_all_shared_is_pooled() -> None:
    clients = federation(pairs())
    own, alone = (
        run(algorithm, clients, module(bias=True)) for algorithm in (SharedLeastSquares(shared=()), LeastSquares())
    )
    every = run(SharedLeastSquares(shared=(0, 1, 2, "bias")), clients, module(bias=True))
    for who in range(4):
        np.testing.assert_allclose(personal(own, who), personal(alone, who), rtol=1e-9)
        together = Result(alone).global_model()
        weights = torch.cat([together.head.weight.T, together.head.bias[None]])  # type: ignore[union-attr, operator, index]
        np.testing.assert_allclose(personal(every, who), weights.detach(), rtol=1e-9)


def test_a_client_with_too_few_samples_borrows_what_is_shared() -> None:
    """Two samples for three coefficients: alone there is no answer; with one of them shared there is."""
    clients = pairs()
    clients[0] = clients[0][0][:2], clients[0][1][:2]
    done = run(SharedLeastSquares(shared=(1,)), federation(clients), module())
    expected = central(clients, [1])
    for who in range(4):
        np.testing.assert_allclose(personal(done, who), expected[who], rtol=1e-9)
    np.testing.assert_allclose(clients[0][0] @ personal(done, 0), clients[0][1], rtol=1e-9)


def test_what_is_sent_is_of_the_size_of_what_is_shared() -> None:
    done = run(SharedLeastSquares(shared=(4, 1)), federation(pairs(features=7)), module(7))
    assert {name: shape for name, (shape, _) in done.schema.up.items()} == {"S": (3,), "b": (2, 2)}
    assert {name: shape for name, (shape, _) in done.schema.down.items()} == {"w": (2, 2)}


def test_all_clients_count_once_all_have_taken_part_and_unseen_ones_use_w() -> None:
    clients = pairs(5)
    held = federation(clients).holding_out(0.2, 0)
    done = run(SharedLeastSquares(shared=(0,)), held, module(), rounds=30, participation=1)
    seen = [pair for k, pair in enumerate(clients) if k in held.by_name[0]]
    expected = central(seen, [0])
    np.testing.assert_allclose(personal(done, held.by_name[0][0])[0], expected[0][0], rtol=1e-9)
    [unseen] = held.by_name[1]
    x, y = clients[unseen]
    rest = lstsq((x[:, 1:], y - x[:, :1] @ expected[0][:1]))
    np.testing.assert_allclose(personal(done, unseen), np.vstack([expected[0][:1], rest]), rtol=1e-9)


@pytest.mark.parametrize("shared", [(3,), (0, 0), ("bias",)])
def test_inputs_that_are_not_there_are_refused(shared: tuple[int | str, ...]) -> None:
    with pytest.raises(EquipoiseError, match=r"is not allowed; the model's head has 3 inputs, numbered from 0, and no"):
        run(SharedLeastSquares(shared=shared), federation(pairs()), module())


@pytest.mark.parametrize(("setting", "shared"), [(1, [0, 1, 2]), (2, [0, 1]), (3, [0])])
def test_on_polynomials_it_is_the_oracle(setting: int, shared: list[int]) -> None:
    """It knows which coefficients clients share, and is much nearer to the noise-free polynomials than each alone."""
    tables = {"data": {"name": "polynomial", "setting": setting}, "model": {"name": "linear"}}
    clients = Experiment.parse({**tables, "algorithm": {"name": "local"}}).federation(None)
    algorithms = (SharedLeastSquares(shared=tuple(shared)), LeastSquares(towards="zero"))
    oracle, alone = (run(algorithm, clients, module(4, 1), metric="rmse") for algorithm in algorithms)
    x, y = clients.x.numpy(), clients.y.numpy()
    expected = central([(x[rows], y[rows]) for rows in clients.train], shared)
    true = Polynomial(setting=setting).coefficients(10, seed=0)
    for who in range(10):
        np.testing.assert_allclose(personal(oracle, who), expected[who], rtol=1e-8)

    def errors(done: object) -> list[float]:
        heads = [personal(done, who)[:, 0] for who in range(10)]  # type: ignore[arg-type]
        return [float(np.mean((x[clients.test[who]] @ (heads[who] - true[who])) ** 2)) for who in range(10)]

    assert np.mean(errors(oracle)) < 0.9 * np.mean(errors(alone))


def test_a_network_keeps_its_body() -> None:
    done = simulation(SharedLeastSquares(shared=(2, "bias")), rounds=3)
    done.run()
    space = done.task.space
    assert torch.equal(space.body(Result(done).personal_vector(1).vector), space.body(done.task.w0))
    assert done.counters.gradient_samples == 0
