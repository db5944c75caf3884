"""Data in their publishers' formats, and the errors for files that are not."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise import load_data
from equipoise.config.experiment import Experiment
from equipoise.data.source import LoadRequest
from equipoise.data.sources import SOURCES
from equipoise.data.sources.digits import load_excerpt
from equipoise.data.sources.mnist import read_idx
from equipoise.errors import EquipoiseError
from tests.support import datafiles


def test_the_excerpt_is_what_it_says() -> None:
    pool = load_excerpt()
    assert pool.x.shape == (8970, 1, 28, 28)
    assert (float(pool.x.min()), float(pool.x.max())) == (0, 1)
    assert sorted(np.unique(pool.y)) == list(range(10))
    assert len(np.unique(pool.owners)) == 80
    assert np.unique(pool.owners, return_counts=True)[1].min() >= 60


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_packed_or_not(name: str, tmp_path: Path) -> None:
    datafiles.mnist(tmp_path / name)
    pool = SOURCES[name]().load(LoadRequest(tmp_path))
    assert pool.x.shape == (80, 1, 28, 28)
    assert pool.y.tolist() == [*(i % 10 for i in range(60)), *(i % 10 for i in range(20))]


def test_a_missing_file_is_named_with_where_to_get_it(tmp_path: Path) -> None:
    datafiles.mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(EquipoiseError) as caught:
        SOURCES["mnist"]().load(LoadRequest(tmp_path))
    for word in ("t10k-labels-idx1-ubyte", str(tmp_path / "mnist"), "equipoise data get mnist", "--data"):
        assert word in str(caught.value)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    datafiles.mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(datafiles.idx(np.zeros(59)))
    with pytest.raises(EquipoiseError, match="59 labels for 60 images"):
        SOURCES["mnist"]().load(LoadRequest(tmp_path))


def test_labels_out_of_range(tmp_path: Path) -> None:
    datafiles.mnist(tmp_path / "mnist", labels=12)
    with pytest.raises(EquipoiseError, match="label 11; labels are 0 to 9"):
        SOURCES["mnist"]().load(LoadRequest(tmp_path))


@given(st.data())
@settings(max_examples=150)
def test_a_corrupt_file_brings_a_sentence(tmp_path_factory, data: st.DataObject) -> None:
    content = bytearray(datafiles.idx(np.arange(60).reshape(3, 4, 5)))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, 15))] ^= data.draw(st.integers(1, 255))
    packed = data.draw(st.booleans())
    raw = gzip.compress(bytes(content)) if packed else bytes(content)
    if packed and data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    path = tmp_path_factory.mktemp("idx") / ("file.gz" if packed else "file")
    path.write_bytes(raw)
    with pytest.raises(EquipoiseError, match="file"):
        read_idx(path)


def test_the_real_fashion_mnist(real_data: Path) -> None:
    pool = SOURCES["fashion-mnist"]().load(LoadRequest(real_data))
    assert pool.x.shape == (70_000, 1, 28, 28)
    assert np.bincount(pool.y).tolist() == [7000] * 10


@pytest.mark.slow
def test_the_excerpt_is_taken_from_the_real_mnist(real_data: Path) -> None:
    pool, excerpt = SOURCES["mnist"]().load(LoadRequest(real_data)), load_excerpt()
    known = {row.tobytes() for row in pool.x.numpy()}
    assert all(row.tobytes() in known for row in excerpt.x.numpy()[::37])


def test_every_client_of_an_experiment_is_split_as_asked() -> None:
    experiment = Experiment.parse(
        {
            "data": {"name": "digits-by-writer", "clients": 10, "split": [0.5, 0.2, 0.3]},
            "model": {"name": "softmax"},
            "algorithm": {"name": "local"},
        }
    )
    federation = experiment.federation(Path("nowhere"))
    assert len(federation) == 10
    total = federation.train.lengths + federation.validation.lengths + federation.test.lengths
    np.testing.assert_allclose(federation.test.lengths / total, 0.3, atol=0.02)
    flat = np.concatenate([federation.train.flat, federation.validation.flat, federation.test.flat])
    assert len(np.unique(flat)) == len(flat) == total.sum()


def test_only_the_clients_that_were_named() -> None:
    everybody = load_data("polynomial", clients=5)
    two = load_data("polynomial", clients=5, only=[everybody.names[3], everybody.names[1]])
    assert two.names == (everybody.names[1], everybody.names[3])
    for part in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(two, part)[1], getattr(everybody, part)[3])
    assert two.title == "polynomial (2 of 5 clients)"
    with pytest.raises(EquipoiseError, match=r"data.only names 'nobody', which is not a client"):
        load_data("polynomial", clients=5, only=["nobody"])
    with pytest.raises(EquipoiseError, match=r"data.only = \[\] is not allowed"):
        load_data("polynomial", clients=5, only=[])
