"""Partitions: disjoint, covering, from the seed alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.config.experiment import Experiment
from equipoise.data.config import DataSection, load_data
from equipoise.data.federation import SPLIT, split_sizes
from equipoise.data.partitions import PARTITIONS
from equipoise.data.partitions.base import Partition, own_copies
from equipoise.data.partitions.dirichlet import Dirichlet
from equipoise.data.partitions.hybrid import Hybrid
from equipoise.data.partitions.iid import IID
from equipoise.data.partitions.labels import Labels
from equipoise.data.partitions.natural import Natural
from equipoise.data.partitions.quality import Quality
from equipoise.data.partitions.quantity import Quantity
from equipoise.data.partitions.shards import Shards
from equipoise.data.pool import Pool
from equipoise.errors import EquipoiseError
from equipoise.randomness import generator


def pool(n: int, classes: int, seed: int = 0) -> Pool:
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(classes), rng.integers(0, classes, max(0, n - classes))])[:n]
    names = tuple(f"owner-{i}" for i in range(5))
    return Pool(torch.zeros(n, 1), torch.from_numpy(y), classes, rng.integers(0, 5, n), names)


dealt = st.one_of(
    st.just(IID()),
    st.builds(Labels, per_client=st.integers(1, 3)),
    st.builds(Shards, per_client=st.integers(1, 3)),
    st.builds(Dirichlet, beta=st.floats(1e-3, 100), min_samples=st.integers(1, 4)),
    st.builds(Quantity, beta=st.floats(1e-3, 100), min_samples=st.integers(1, 4)),
    st.builds(Quality, sigma=st.floats(0.01, 1)),
)
partitions = st.one_of(dealt, st.just(Natural()))


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
    if isinstance(part, (Dirichlet, Quantity)):
        assert min(map(len, shares.values())) >= part.min_samples
    if isinstance(part, Labels):
        assert all(len(np.unique(data.y.numpy()[s])) == part.per_client for s in shares.values())
    if isinstance(part, Natural):
        assert all((data.owners[s] == name).all() for name, s in shares.items())
    if isinstance(part, Shards):  # sorted by label and cut: a shard has few labels, and no client more than its shards
        assert max(map(len, shares.values())) - min(map(len, shares.values())) <= part.per_client
    if isinstance(part, IID):
        sizes = [len(s) for s in shares.values()]
        assert max(sizes) - min(sizes) <= 1


@given(dealt, dealt, st.floats(0.05, 0.95), st.integers(300, 500), st.integers(8, 20), st.integers(0, 99))
@settings(max_examples=100)
def test_a_hybrid_of_any_two_kinds(
    first: Partition, second: Partition, fraction: float, n: int, clients: int, seed: int
) -> None:
    data = pool(n, 3, seed)
    part = Hybrid(first=first, second=second, fraction=fraction)
    firsts = min(max(round(fraction * clients), 1), clients - 1)
    if any(isinstance(p, Labels) and m * p.per_client < 3 for p, m in ((first, firsts), (second, clients - firsts))):
        return  # too few clients on that side to hold every label
    shares = part(data, clients, generator(seed, "partition"))
    assert len(shares) == clients
    assert sorted(np.concatenate(list(shares.values())).tolist()) == list(range(n))
    labels = [len(np.unique(data.y.numpy()[share])) for share in shares.values()]
    if isinstance(first, Labels):
        assert set(labels[:firsts]) == {first.per_client}
    if isinstance(second, Labels):
        assert set(labels[firsts:]) == {second.per_client}
    variances = part.variances(clients)
    assert np.array_equal(variances[:firsts], first.variances(firsts))
    assert np.array_equal(variances[firsts:], second.variances(clients - firsts))


def test_the_papers_hybrid_is_the_default() -> None:
    data = pool(4000, 10)
    shares = list(Hybrid()(data, 10, generator(0, "partition")).values())
    assert [len(np.unique(data.y.numpy()[share])) for share in shares[:5]] == [2] * 5
    sizes = [len(share) for share in shares]
    assert sum(sizes[:5]) == 2000
    assert max(sizes[5:]) > 2 * min(sizes[5:])


def test_a_hybrid_of_the_whole_pool_gives_every_sample_to_a_client_of_each_half() -> None:
    data = pool(400, 10)
    part = Hybrid(first=Labels(per_client=2, min_samples=40), second=Quantity(min_samples=40), pool="whole")
    shares = list(part(data, 10, generator(0, "partition")).values())
    for half in (shares[:5], shares[5:]):
        assert sorted(np.concatenate(half).tolist()) == list(range(400))
    assert min(map(len, shares)) >= 40
    assert [len(np.unique(data.y.numpy()[share])) for share in shares[:5]] == [2] * 5


def test_samples_of_two_clients_are_copied_so_that_each_has_its_own() -> None:
    whole = replace(pool(60, 5), x=torch.arange(60.0)[:, None])
    shares = Hybrid(first=IID(), second=Quantity(beta=2.0, min_samples=5), pool="whole")(whole, 4, generator(0, "p"))
    copied, disjoint = own_copies(whole, shares)
    assert len(copied) == 120
    assert sorted(np.concatenate(list(disjoint.values())).tolist()) == list(range(120))
    for name, share in shares.items():
        rows = torch.from_numpy(disjoint[name])
        assert torch.equal(copied.x[rows, 0], torch.from_numpy(share).float())
        assert torch.equal(copied.y[rows], whole.y[torch.from_numpy(share)])
    assert "60 samples belong to two clients" in copied.notes[0]
    apart = IID()(whole, 4, generator(0, "p"))
    assert own_copies(whole, apart) == (whole, apart)


def test_noise_on_the_copies_of_one_half_is_not_in_the_other() -> None:
    """Every sample is once without noise, and once with it."""
    data = {"name": "digits-by-writer", "clients": 4}
    halves = {"kind": "hybrid", "first": {"kind": "iid"}, "second": {"kind": "quality", "sigma": 4.0}, "pool": "whole"}
    section = DataSection.parse({**data, "partition": halves})
    found = section._divided(replace(pool(40, 5), x=torch.arange(40.0)[:, None]), 0)
    near = (found.x - found.x.round()).abs() < 1e-6
    assert len(found.x) == 80
    assert 35 <= int(near.sum()) <= 45
    assert "60 samples" not in found.notes[0]
    assert "40 samples belong to two clients" in found.notes[0]


def test_a_hybrid_with_owners_keeps_their_names() -> None:
    data = pool(400, 5)
    shares = Hybrid(first=Natural(), second=IID())(data, 6, generator(0, "partition"))
    assert list(shares)[3:] == ["client-3", "client-4", "client-5"]
    for name in list(shares)[:3]:
        assert (data.owners[shares[name]] == name).all()
    with pytest.raises(EquipoiseError, match="natural twice"):
        Hybrid(first=Natural(), second=Natural())(data, 6, generator(0, "partition"))


def test_a_hybrid_keeps_all_clients_whatever_the_owners_are_called() -> None:
    tables = {
        "data": {"name": "polynomial", "partition": {"kind": "hybrid", "first": {"kind": "natural"}}, "clients": 10},
        "model": {"name": "linear"},
        "algorithm": {"name": "local"},
    }
    for seed in range(3):
        federation = Experiment.parse({**tables, "seed": seed}).federation(Path("nowhere"))
        assert len(federation) == 10
        assert sum("dealt" in name for name in federation.names) == 5
        assert sum(getattr(federation, s).lengths.sum() for s in ("train", "validation", "test")) <= 2200


def test_shards_bring_at_most_one_label_each_where_cuts_fall_between_labels() -> None:
    labels = np.repeat(np.arange(10), 60)
    shares = Shards(per_client=3).divide(labels, 20, generator(0, "partition"))  # 60 shards, six of each label
    assert all(len(share) == 30 for share in shares)
    assert all(len(np.unique(labels[share])) <= 3 for share in shares)


@pytest.mark.parametrize("beta", [5e-324, 1e-3, 0.01, 0.1, 1.0, 1e30])
@pytest.mark.parametrize("kind", [Dirichlet, Quantity])
def test_it_ends_for_every_beta_with_a_thousand_clients(kind: type, beta: float) -> None:
    shares = kind(beta=beta)(pool(20_000, 10), 1000, generator(0, "partition"))
    assert min(map(len, shares.values())) >= 10
    assert sum(map(len, shares.values())) == 20_000


def test_quantity_becomes_even_for_large_beta_and_keeps_the_labels_mixed() -> None:
    data = pool(20_000, 4)

    def sizes(beta: float) -> np.ndarray:
        shares = Quantity(beta=beta)(data, 10, generator(0, "partition"))
        for share in shares.values():
            if len(share) > 1000:
                assert np.abs(np.bincount(data.y[share]) / len(share) - 0.25).max() < 0.06
        return np.array([len(share) for share in shares.values()])

    assert sizes(1e4).std() < 100 < sizes(0.5).std() < sizes(0.05).std()


def test_another_seed_divides_otherwise() -> None:
    data = pool(200, 5)
    for name, cls in PARTITIONS.items():
        clients = 4 if name == "natural" else 8
        one, two = (cls()(data, clients, generator(seed, "partition")) for seed in (0, 1))
        assert one.keys() != two.keys() or any(not np.array_equal(one[k], two[k]) for k in one)


def test_dirichlet_becomes_even_for_large_beta_and_uneven_for_small() -> None:
    data = pool(10_000, 10)

    def distance(beta: float) -> float:
        shares = Dirichlet(beta=beta)(data, 10, generator(0, "partition"))
        pooled = np.bincount(data.y, minlength=10) / len(data)
        rows = [np.bincount(data.y[s], minlength=10) / len(s) for s in shares.values()]
        return float(np.mean([np.abs(row - pooled).sum() / 2 for row in rows]))

    assert distance(1e4) < 0.05 < distance(1.0) < distance(0.1)


@pytest.mark.parametrize("kind", ["labels", "shards", "dirichlet"])
def test_skew_of_labels_needs_labels(kind: str) -> None:
    numbers = Pool(torch.zeros(50, 3), torch.zeros(50, 1), None)
    texts = Pool(torch.zeros(50, 3), torch.zeros(50, 3, dtype=torch.long), 9)
    for data in (numbers, texts):
        with pytest.raises(EquipoiseError, match="needs data with one label per sample"):
            PARTITIONS[kind]()(data, 5, generator(0, "partition"))
    for other in (IID(), Quantity(min_samples=2), Quality()):
        assert len(other(numbers, 5, generator(0, "partition"))) == 5


def test_natural_leaves_small_owners_out() -> None:
    data = pool(200, 5)
    sizes = {name: (data.owners == name).sum() for name in np.unique(data.owners)}
    least = sorted(sizes.values())[2]
    shares = Natural(min_samples=int(least))(data, None, generator(0, "partition"))
    assert set(shares) == {name for name, size in sizes.items() if size >= least}


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
        (Dirichlet(min_samples=30), 10, "min_samples = 30 needs 300 samples, and there are 100"),
        (IID(), 101, "needs 101 samples, and there are 100"),
        (Labels(per_client=1, min_samples=21), 5, "needs 105 samples"),
        (IID(min_samples=15), 7, "needs 105 samples, and there are 100"),
        (Labels(per_client=1, min_samples=12), 8, "cannot be met: a client gets"),
        (Shards(per_client=30), 5, "5 clients with 30 shards each need at least 150 samples"),
        (Natural(min_samples=90), None, "only 0 owners with at least 90 samples"),
        (Hybrid(), 1, "at least 2"),
        (Hybrid(min_samples=11), 9, "cannot be met"),
        (Natural(), 9, "only 5 owners"),
        (IID(), None, "data.clients is missing"),
    ],
)
def test_what_cannot_be_is_said(part: Partition, clients: int | None, message: str) -> None:
    with pytest.raises(EquipoiseError, match=message):
        part(pool(100, 5), clients, generator(0, "partition"))


@pytest.mark.parametrize(
    "partition",
    [
        {"kind": "quantity", "beta": 0.1},
        {"kind": "dirichlet", "beta": 0.1},
        {"kind": "hybrid", "first": {"kind": "labels", "per_client": 2}, "second": {"kind": "quantity", "beta": 0.1}},
        {"kind": "natural"},
    ],
)
def test_every_client_has_enough_test_samples(partition: dict) -> None:
    data = {"name": "digits-by-writer", "partition": partition}
    data |= {} if partition["kind"] == "natural" else {"clients": 10}
    found, before = (DataSection.parse(data | more)._shares(pool(1500, 5), 0) for more in ({"min_test": 20}, {}))
    assert min(split_sizes(len(share), SPLIT)[2] for share in found.values()) >= 20
    if partition["kind"] != "natural":
        assert min(split_sizes(len(share), SPLIT)[2] for share in before.values()) < 20
    with pytest.raises(EquipoiseError, match=r"data\.min_test = 5000 is"):
        DataSection.parse(data | {"min_test": 5000})._shares(pool(1500, 5), 0)


def test_data_that_are_divided_already_have_the_tests_that_they_have() -> None:
    with pytest.raises(EquipoiseError, match="whose samples are divided already"):
        load_data("polynomial", min_test=20)
