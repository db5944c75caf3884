"""Data that are drawn: what they promise, exactly."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.config.experiment import Experiment
from equipoise.data.federation import Federation
from equipoise.data.source import LoadRequest
from equipoise.data.sources.linear import LinearRegression
from equipoise.data.sources.polynomial import BASE, Polynomial
from equipoise.errors import EquipoiseError

NOWHERE = Path("nowhere")


def federation(**data: object) -> Federation:
    tables = {"data": data, "model": {"name": "linear"}, "algorithm": {"name": "local"}}
    return Experiment.parse(tables).federation(NOWHERE)


@pytest.mark.parametrize(("setting", "shared"), [(1, 3), (2, 2), (3, 1)])
def test_which_coefficients_are_shared(setting: int, shared: int) -> None:
    a = Polynomial(setting=setting).coefficients(10, seed=0)
    assert np.array_equal(a[:, :shared], np.tile(BASE[:shared], (10, 1)))
    for column in range(shared, 4):
        assert len(np.unique(a[:, column])) == 10
        assert np.abs(a[:, column] - BASE[column]).max() <= 10


@pytest.mark.parametrize("layout", ["alike", "segments"])
def test_polynomial_points_lie_on_their_polynomial(layout: str) -> None:
    source = Polynomial(setting=2, layout=layout, points=205)
    clients = federation(name="polynomial", setting=2, layout=layout, points=205)
    a = source.coefficients(10, seed=0)
    assert sorted(clients.train.lengths) == [20] * 5 + [21] * 5
    for i in range(10):
        x, y = (t.numpy() for t in (clients.x[clients.test[i]], clients.y[clients.test[i]]))
        np.testing.assert_allclose(y[:, 0], x @ a[i], atol=1e-12)  # no noise in the test part
        np.testing.assert_allclose(x, x[:, 1:2] ** np.arange(4))
        train = clients.x[clients.train[i]].numpy()
        noise = clients.y[clients.train[i]].numpy()[:, 0] - train @ a[i]
        assert 0.04 < noise.std() < 0.2
    if layout == "segments":  # sorted and cut: nobody's stretch reaches into another's
        ends = [(clients.x[clients.train[i], 1].min(), clients.x[clients.train[i], 1].max()) for i in range(10)]
        assert all(ends[i][1] <= ends[i + 1][0] for i in range(9))


def in_both_bases(**data: object) -> tuple[Federation, Federation]:
    powers, legendre = (federation(name="polynomial", basis=basis, **data) for basis in ("monomials", "legendre"))
    return powers, legendre


@pytest.mark.parametrize("layout", ["alike", "segments"])
def test_the_basis_changes_inputs_and_nothing_else(layout: str) -> None:
    """The same noisy values, the same span, and so the same least squares."""
    powers, legendre = in_both_bases(layout=layout, setting=2)
    assert np.array_equal(powers.y, legendre.y)
    x, z = (each.x.double().numpy() for each in (powers, legendre))
    change = np.linalg.lstsq(z, x, rcond=None)[0]  # powers in terms of the basis
    np.testing.assert_allclose(z @ change, x, atol=1e-12)
    np.testing.assert_allclose(np.tril(change, -1), 0, atol=1e-12)  # coefficient k mixes those of x^k and above
    a = Polynomial(setting=2).coefficients(10, seed=0)
    test = powers.test[4]
    np.testing.assert_allclose(z[test] @ (change @ a[4]), powers.y[test, 0], atol=1e-12)  # without noise in this part
    assert np.ptp(a @ change.T, axis=0).min() > 0.1  # no coefficient is shared
    for i in range(10):
        rows, y = powers.train[i], powers.y[powers.train[i]].numpy()
        one, two = (np.linalg.lstsq(each[rows], y, rcond=None)[0] for each in (x, z))
        np.testing.assert_allclose(x[powers.test[i]] @ one, z[powers.test[i]] @ two, atol=1e-8)


def test_legendre_inputs_are_orthonormal() -> None:
    def gram(clients: Federation) -> np.ndarray:
        x = clients.x[np.concatenate([clients.train[i] for i in range(10)])].double().numpy()
        return x.T @ x / len(x)

    powers, legendre = map(gram, in_both_bases(points=100_000))
    np.testing.assert_allclose(legendre, np.eye(4), atol=0.03)
    assert np.linalg.cond(legendre) < 1.1
    assert np.linalg.cond(powers) > 10_000
    nodes, weights = np.polynomial.legendre.leggauss(4)  # exact for products of cubics
    z = Polynomial(basis="legendre")._inputs((nodes + 1) / 2)
    np.testing.assert_allclose(z.T @ (weights[:, None] / 2 * z), np.eye(4), atol=1e-13)


def test_an_oracle_and_local_least_squares_on_the_polynomials() -> None:
    """With 100 points a client and noise 0.1: some 0.018 alone, some 0.009 for who knows what is shared."""
    alone, oracle = [], []
    for seed in range(5):
        source = Polynomial(setting=1)
        pool = source.load(LoadRequest(NOWHERE, 10, seed=seed))
        a = source.coefficients(10, seed)
        x, y, names = pool.x.numpy(), pool.y.numpy()[:, 0], np.unique(pool.owners)
        train = pool.part == 0
        # shared coefficients once, the others a column a client
        own = (pool.owners[:, None] == names[None]) * x[:, 3:]
        design = np.concatenate([x[:, :3], own], axis=1)
        fitted = np.linalg.lstsq(design[train], y[train], rcond=None)[0]
        for i, name in enumerate(names):
            mine = pool.owners == name
            local = np.linalg.lstsq(x[train & mine], y[train & mine], rcond=None)[0]
            test = x[(pool.part == 2) & mine]
            alone.append(np.sqrt(np.mean((test @ (local - a[i])) ** 2)))
            both = np.concatenate([fitted[:3], fitted[3 + i : 4 + i]])
            oracle.append(np.sqrt(np.mean((test @ (both - a[i])) ** 2)))
    assert 0.014 < np.mean(alone) < 0.024
    assert 0.006 < np.mean(oracle) < 0.012


@given(st.integers(1, 12), st.integers(0, 40), st.floats(0.01, 50), st.integers(0, 99))
@settings(max_examples=40)
def test_the_inputs_of_linear_regression_are_orthogonal_in_every_part(d: int, more: int, b: float, seed: int) -> None:
    n = d + more
    pool = LinearRegression(dimension=d, samples=n, b=b).load(LoadRequest(NOWHERE, 3, seed=seed))
    for name in np.unique(pool.owners):
        for part in range(3):
            x = pool.x[(pool.owners == name) & (pool.part == part)].numpy()
            np.testing.assert_allclose(x.T @ x, n * b * np.eye(d), atol=1e-10 * n * b)


def test_linear_targets_have_the_stated_parameters_and_noise() -> None:
    source = LinearRegression(dimension=4, samples=4000, sigma=0.3, spread=2.0, common=5.0)
    pool, theta = source.load(LoadRequest(NOWHERE, 6, seed=1)), source.parameters(6, 1)
    for i, name in enumerate(np.unique(pool.owners)):
        mine = pool.owners == name
        noise = pool.y[mine].numpy()[:, 0] - pool.x[mine].numpy() @ theta[i]
        assert abs(noise.std() - 0.3) < 0.02
    many = source.parameters(5000, 1)
    assert abs(many.mean() - 5) < 0.05
    assert abs(many.std() - 2) < 0.05


def test_drawn_data_come_from_the_seed_and_the_clients_name() -> None:
    for source in (Polynomial(), LinearRegression()):
        one, again, other = (source.load(LoadRequest(NOWHERE, 5, seed=s)) for s in (0, 0, 1))
        assert np.array_equal(one.x, again.x)
        assert np.array_equal(one.y, again.y)
        assert not np.array_equal(one.y, other.y)


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(EquipoiseError, match=r"data.samples = 3 is less than data.dimension = 10"):
        LinearRegression(samples=3).load(LoadRequest(NOWHERE))
    with pytest.raises(EquipoiseError, match=r"data.points = 5 cannot be divided over 10"):
        Polynomial(points=5).load(LoadRequest(NOWHERE))
    with pytest.raises(EquipoiseError, match=r"data.split cannot be set for data.name = 'linear'"):
        federation(name="linear", split=[0.5, 0.2, 0.3])
