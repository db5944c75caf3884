"""Partitions: disjoint, covering, from the seed alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data.federation import from_clients, from_shares, split_client
from equipoise.data.partitions import PARTITIONS
from equipoise.data.partitions.base import Partition
from equipoise.data.partitions.dirichlet import Dirichlet
from equipoise.data.partitions.iid import IID
from equipoise.data.partitions.labels import Labels
from equipoise.data.partitions.natural import Natural
from equipoise.data.pool import Pool
from equipoise.errors import EquipoiseError
from equipoise.randomness import generator


def pool(n: int, classes: int, seed: int = 0) -> Pool:
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(classes), rng.integers(0, classes, max(0, n - classes))])[:n]
    owners = np.array([f"owner-{i}" for i in rng.integers(0, 5, n)])
    return Pool(torch.zeros(n, 1), torch.from_numpy(y), classes, owners)


partitions = st.one_of(
    st.just(IID()),
    st.builds(Labels, per_client=st.integers(1, 3)),
    st.builds(Dirichlet, beta=st.floats(1e-3, 100), min_samples=st.integers(1, 4)),
    st.just(Natural()),
)


@given(partitions, st.integers(60, 300), st.integers(3, 10), st.integers(10, 12), st.integers(0, 99))
@settings(max_examples=150)
def test_disjoint_covering_and_reproducible(part: Partition, n: int, classes: int, clients: int, seed: int) -> None:
    data = pool(n, classes, seed)
    count = None if isinstance(part, Natural) else clients
    holders = clients * part.per_client / classes if isinstance(part, Labels) else 0
    if np.bincount(data.y).min() < holders + 1:
        return  # a label may have fewer samples than clients that want some
    shares = part(data, count, generator(seed, "partition"))
    everything = np.concatenate(list(shares.values()))
    assert sorted(everything.tolist()) == list(range(n))
    assert count is None or len(shares) == count
    again = part(data, count, generator(seed, "partition"))
    assert list(shares) == list(again)
    assert all(np.array_equal(shares[k], again[k]) for k in shares)
    if isinstance(part, Dirichlet):
        assert min(map(len, shares.values())) >= part.min_samples
    if isinstance(part, Labels):
        assert all(len(np.unique(data.y.numpy()[s])) == part.per_client for s in shares.values())
    if isinstance(part, Natural):
        assert all((data.owners[s] == name).all() for name, s in shares.items())
    if isinstance(part, IID):
        sizes = [len(s) for s in shares.values()]
        assert max(sizes) - min(sizes) <= 1


def test_another_seed_divides_otherwise() -> None:
    data = pool(100, 5)
    for name, cls in PARTITIONS.items():
        if name != "natural":
            one, two = (cls()(data, 5, generator(seed, "partition")) for seed in (0, 1))
            assert any(not np.array_equal(one[k], two[k]) for k in one)


def test_dirichlet_ends_for_tiny_beta_and_many_clients() -> None:
    shares = Dirichlet(beta=0.01)(pool(20_000, 10), 1000, generator(0, "partition"))
    assert min(map(len, shares.values())) >= 10
    assert sum(map(len, shares.values())) == 20_000


def test_dirichlet_becomes_even_for_large_beta_and_uneven_for_small() -> None:
    data = pool(10_000, 10)

    def distance(beta: float) -> float:
        shares = Dirichlet(beta=beta)(data, 10, generator(0, "partition"))
        pooled = np.bincount(data.y, minlength=10) / len(data)
        rows = [np.bincount(data.y[s], minlength=10) / len(s) for s in shares.values()]
        return float(np.mean([np.abs(row - pooled).sum() / 2 for row in rows]))

    assert distance(1e4) < 0.05 < distance(1.0) < distance(0.1)


def test_natural_takes_as_many_owners_as_asked() -> None:
    data = pool(200, 5)
    three = Natural()(data, 3, generator(0, "partition"))
    assert len(three) == 3
    whole = Natural()(data, None, generator(0, "partition"))
    assert all(np.array_equal(whole[name], share) for name, share in three.items())


@pytest.mark.parametrize(
    ("part", "clients", "message"),
    [
        (Labels(per_client=20), 5, "there are 5 labels"),
        (Labels(per_client=1), 2, "cannot hold all 5 labels"),
        (Dirichlet(min_samples=30), 10, "needs 300 samples, and there are 100"),
        (IID(), 101, "more than the 100 samples"),
        (Natural(), 9, "only 5 owners"),
        (IID(), None, "data.clients is missing"),
    ],
)
def test_what_cannot_be_is_said(part: Partition, clients: int | None, message: str) -> None:
    with pytest.raises(EquipoiseError, match=message):
        part(pool(100, 5), clients, generator(0, "partition"))


@given(st.integers(1, 200), st.floats(0.01, 1), st.floats(0, 1), st.integers(0, 9))
def test_split_is_disjoint_and_leaves_something_to_train_on(n: int, train: float, share: float, seed: int) -> None:
    fractions = (train, (1 - train) * share, (1 - train) * (1 - share))
    indices = np.arange(n) * 3
    parts = split_client(indices, fractions, generator(seed, "split", "a"))
    assert sorted(np.concatenate(parts).tolist()) == indices.tolist()
    assert len(parts[0]) >= 1
    if n >= 50 and train > 0.1:
        assert abs(len(parts[1]) - n * fractions[1]) <= 1
        assert abs(len(parts[2]) - n * fractions[2]) <= 1


def test_a_clients_split_depends_on_its_name_alone() -> None:
    x, y = torch.zeros(40, 1), torch.zeros(40, dtype=torch.long)
    shares = {"a": np.arange(20), "b": np.arange(20, 40)}
    one = from_shares(x, y, shares, (0.5, 0.25, 0.25), 0)
    two = from_shares(x, y, dict(reversed(shares.items())), (0.5, 0.25, 0.25), 0)
    assert np.array_equal(one.train[0], two.train[1])
    assert np.array_equal(one.test[1], two.test[0])


@pytest.mark.parametrize(
    ("clients", "names", "message"),
    [
        ([], None, "list of clients is empty"),
        ([(np.zeros((2, 3)), np.zeros(3))], None, "2 inputs and 3 targets"),
        ([(np.zeros((2, 3)), np.zeros(2)), (np.zeros((2, 4)), np.zeros(2))], None, "different shapes"),
        ([(np.zeros((0, 3)), np.zeros(0))], None, "no training samples"),
        ([{"test": (np.zeros((2, 3)), np.zeros(2))}], None, "needs 'train'"),
        ([(np.zeros((2, 3)), np.zeros(2))] * 2, ["a", "a"], "two clients are named 'a'"),
        ([(np.zeros((2, 3)), np.zeros(2))] * 2, ["a"], "2 clients and 1 names"),
    ],
)
def test_bad_clients_are_named(clients: list, names: list | None, message: str) -> None:
    with pytest.raises(EquipoiseError, match=message):
        from_clients(clients, names=names)
