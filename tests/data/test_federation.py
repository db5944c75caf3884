"""A federation from shares or from clients: splits, noise, and the errors for invalid clients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.config.experiment import Experiment
from equipoise.data.config import DataSection, load_data
from equipoise.data.federation import from_clients, from_shares, split_client
from equipoise.data.input_noise import with_noise
from equipoise.data.partitions.quality import Quality
from equipoise.data.pool import Pool
from equipoise.data.sources.digits import load_excerpt
from equipoise.errors import EquipoiseError
from equipoise.randomness import generator
from tests.support.datafiles import roles


def test_inputs_are_normalised_before_noise_is_added() -> None:
    common = {"clients": 4, "extent": "excerpt"}
    plain = load_data("digits-by-writer", **common)
    normal = load_data("digits-by-writer", normalize=[0.1307, 0.3081], **common)
    torch.testing.assert_close(normal.x, (plain.x - 0.1307) / 0.3081)
    noise = {"partition": {"kind": "quality", "sigma": 0.5}, **common}
    noisy, both = load_data("digits-by-writer", **noise), load_data("digits-by-writer", normalize=[0.5, 0.1], **noise)
    own, same = (torch.from_numpy(np.concatenate([f.train[3], f.test[3]])) for f in (noisy, both))
    assert torch.equal(own, same)
    clean = load_data("digits-by-writer", partition={"kind": "iid"}, **common)
    torch.testing.assert_close(both.x[own] - (clean.x[own] - 0.5) / 0.1, noisy.x[own] - clean.x[own], rtol=0, atol=1e-4)


def test_symbols_are_not_normalised(tmp_path: Path) -> None:
    roles(tmp_path / "shakespeare-roles.json.xz")
    with pytest.raises(EquipoiseError, match="those of shakespeare are symbols"):
        load_data("shakespeare", normalize=[0.5, 0.1], data=tmp_path)


def test_the_noise_of_quality_is_drawn_once_with_the_stated_variance() -> None:
    x = torch.zeros(4000, 30)
    data = Pool(x, torch.zeros(4000, dtype=torch.long), 2)
    part = Quality(sigma=0.4)
    shares = part(data, 4, generator(0, "partition"))
    np.testing.assert_allclose(part.variances(4), [0.1, 0.2, 0.3, 0.4])
    one, two, other = (with_noise(x, shares, part.variances(4), seed) for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not x.any()  # the pool itself is left alone
    for share, variance in zip(shares.values(), [0.1, 0.2, 0.3, 0.4], strict=True):
        assert abs(float(one[torch.from_numpy(share)].var()) / variance - 1) < 0.05
        assert abs(float(one[torch.from_numpy(share)].mean())) < 0.02
    assert with_noise(x, shares, np.zeros(4), 0) is x
    with pytest.raises(EquipoiseError, match="symbols"):
        with_noise(torch.zeros(4000, 30, dtype=torch.uint8), shares, part.variances(4), 0)


def test_noise_is_on_train_and_test_alike() -> None:
    tables = {
        "data": {
            "name": "digits-by-writer",
            "extent": "excerpt",
            "clients": 5,
            "partition": {"kind": "quality", "sigma": 1.0},
        },
        "model": {"name": "softmax"},
        "algorithm": {"name": "local"},
    }
    clean = load_excerpt().x
    federation = Experiment.parse(tables).federation(Path("nowhere"))
    for i in range(5):
        for split in (federation.train, federation.validation, federation.test):
            rows = torch.from_numpy(split[i])
            assert abs(float((federation.x[rows] - clean[rows]).var()) / ((i + 1) / 5) - 1) < 0.05


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


def test_only_training_samples_are_left_out_and_the_title_says_so() -> None:
    table = {"name": "digits-by-writer", "extent": "excerpt", "clients": 6}
    whole, some = (DataSection.parse(table | more).federation(None, 3) for more in ({}, {"most": 20}))
    for i in range(6):
        np.testing.assert_array_equal(whole.validation[i], some.validation[i])
        np.testing.assert_array_equal(whole.test[i], some.test[i])
        assert len(some.train[i]) == min(20, len(whole.train[i]))
        assert set(some.train[i]) <= set(whole.train[i])
    again = DataSection.parse(table | {"most": 20}).federation(None, 3)
    np.testing.assert_array_equal(again.train.flat, some.train.flat)
    assert some.title.endswith("at most 20 a client to train with)")
