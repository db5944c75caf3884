"""Images in their publishers' formats: what is read is what was written."""

import gzip
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from tests.support import datafiles
from tests.support.datafiles import load


def test_digits_by_writer_join_mnist_with_the_writers(tmp_path: Path) -> None:
    datafiles.digits(tmp_path / "mnist")
    pool = load("digits-by-writer", tmp_path)
    assert torch.equal(pool.x, load("mnist", tmp_path).x)
    assert pool.owners is not None
    expected = [f"writer-{100 + i % 4:04d}" for i in range(60)] + [f"writer-{110 + i % 4:04d}" for i in range(20)]
    assert pool.owners.tolist() == expected
    assert pool.portion == "80 of 70,000 samples"


def test_digits_by_writer_fall_back_on_the_excerpt_and_say_so(tmp_path: Path) -> None:
    assert load("digits-by-writer", tmp_path).portion == "excerpt of 80 writers"
    with pytest.raises(EquipoiseError, match="qmnist-train-labels"):
        load("digits-by-writer", tmp_path, extent="full")
    datafiles.digits(tmp_path / "mnist")
    assert len(load("digits-by-writer", tmp_path, extent="excerpt")) == 8970


def test_labels_of_other_digits_are_refused(tmp_path: Path) -> None:
    datafiles.digits(tmp_path / "mnist")
    rows = np.zeros((60, 8))
    (tmp_path / "mnist" / "qmnist-train-labels-idx2-int.gz").unlink()
    (tmp_path / "mnist" / "qmnist-train-labels-idx2-int").write_bytes(datafiles.idx(rows, 0x0C))
    with pytest.raises(EquipoiseError, match="does not belong to"):
        load("digits-by-writer", tmp_path)


@pytest.mark.parametrize(("name", "fine"), [("cifar10", False), ("cifar100", True)])
def test_cifar_packed_or_not(name: str, fine: bool, tmp_path: Path) -> None:
    archive = tmp_path / SOURCES[name].archive  # type: ignore[attr-defined]
    pixels = datafiles.cifar(archive, fine)
    pool = load(name, tmp_path)
    assert np.array_equal((pool.x.numpy() * 255).round().astype(np.uint8), pixels)
    assert pool.y[:12].tolist() == ([7 * k % 100 for k in range(12)] if fine else [k % 10 for k in range(12)])
    assert pool.portion == f"{len(pixels)} of 60,000 samples"
    with tarfile.open(archive) as file:
        for member in file:
            content = file.extractfile(member)
            assert content is not None
            target = tmp_path / "open" / SOURCES[name].inside / Path(member.name).name  # type: ignore[attr-defined]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())
    assert torch.equal(load(name, tmp_path / "open").x, pool.x)


def test_cifar_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    datafiles.cifar(path, labels=13)
    with pytest.raises(EquipoiseError, match=r"data_batch_1.bin has the label 11; labels are 0 to 9"):
        load("cifar10", tmp_path)
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("data_batch_1.bin"), io.BytesIO())
    with pytest.raises(EquipoiseError, match="has 0 bytes, which is not a multiple of"):
        load("cifar10", tmp_path)


def test_an_archive_writes_nothing_outside_and_follows_no_link(tmp_path: Path) -> None:
    """Members with hostile names are read by their last name or passed over; nothing is ever unpacked."""
    folder = tmp_path / "data"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(3073))
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name in (*(f"../../data_batch_{i}.bin" for i in range(1, 6)), "/etc/passwd"):
            info = tarfile.TarInfo(name)
            info.size = 3073
            archive.addfile(info, io.BytesIO(bytes(3073)))
        link = tarfile.TarInfo("test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(EquipoiseError, match="has no test_batch"):
        load("cifar10", folder)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("train.bin")
        info.size = 200_000_000
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    with pytest.raises(EquipoiseError, match="larger than"):
        load("cifar100", tmp_path)


@pytest.mark.parametrize("prefix", ["", "Medical-MNIST-Classification-master/resized/"])
def test_medical_mnist_takes_the_class_from_the_folder(prefix: str, tmp_path: Path) -> None:
    datafiles.medical(tmp_path / "medical-mnist.zip", prefix=prefix)
    pool = load("medical-mnist", tmp_path)
    assert pool.x.shape == (18, 1, 64, 64)
    assert pool.y.tolist() == [label for label in range(6) for _ in range(3)]
    levels = (255 * pool.x.mean((1, 2, 3))).round().int().tolist()
    np.testing.assert_allclose(levels, [40 * label + k for label in range(6) for k in range(3)], atol=2)
    colour = load("medical-mnist", tmp_path, channels=3)
    assert colour.x.shape == (18, 3, 64, 64)
    assert torch.equal(colour.x[:, 2:], pool.x)
    with zipfile.ZipFile(tmp_path / "medical-mnist.zip") as archive:
        archive.extractall(tmp_path / "open" / "medical-mnist")
    if not prefix:
        assert torch.equal(load("medical-mnist", tmp_path / "open").x, pool.x)


def test_no_picture_is_there_twice_and_a_macs_files_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "medical-mnist.zip"
    datafiles.medical(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("__MACOSX/resized/Hand/._000000.jpeg", b"\0\5\x16\7")
    assert len(load("medical-mnist", tmp_path)) == 18
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("copy/Hand/000001.jpeg", datafiles.jpeg(3))
    with pytest.raises(EquipoiseError, match=r"contains Hand/000001\.jpeg twice"):
        load("medical-mnist", tmp_path)


def test_a_picture_that_was_changed_in_place_is_read_anew(tmp_path: Path) -> None:
    folder = tmp_path / "medical-mnist" / "Hand"
    folder.mkdir(parents=True)
    for k in range(2):
        (folder / f"{k}.jpeg").write_bytes(datafiles.jpeg(9))
    before = load("medical-mnist", tmp_path).x
    (folder / "1.jpeg").write_bytes(datafiles.jpeg(200))
    os.utime(folder / "1.jpeg", (1, 1))
    after = load("medical-mnist", tmp_path).x
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_a_link_to_nowhere_is_no_picture(tmp_path: Path) -> None:
    folder = tmp_path / "medical-mnist" / "Hand"
    folder.mkdir(parents=True)
    (folder / "0.jpeg").write_bytes(datafiles.jpeg(9))
    (folder / "1.jpeg").symlink_to(tmp_path / "nowhere")
    assert len(load("medical-mnist", tmp_path)) == 1
    found = SOURCES["medical-mnist"]().look(tmp_path)
    assert found is not None
    assert found.have == 1


def test_medical_mnist_names_the_bad_picture(tmp_path: Path) -> None:
    path = tmp_path / "medical-mnist.zip"
    for bad, message in (
        (b"GIF89a", "Hand/000007.jpeg is not a complete JPEG"),
        (datafiles.jpeg(9, 32), "32 by 32, not 64"),
    ):
        datafiles.medical(path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("Hand/000007.jpeg", bad)
        with pytest.raises(EquipoiseError, match=message):
            load("medical-mnist", tmp_path)


def test_femnist_reads_leaf(tmp_path: Path) -> None:
    datafiles.femnist(tmp_path / "femnist" / "train" / "all_data_0.json")
    raw = json.loads((tmp_path / "femnist" / "train" / "all_data_0.json").read_text())
    pool = load("femnist", tmp_path)
    x = np.concatenate([raw["user_data"][user]["x"] for user in raw["users"]])
    np.testing.assert_allclose(pool.x.numpy().reshape(-1, 784), x, atol=1e-6)
    assert pool.y.tolist() == [label for user in raw["users"] for label in raw["user_data"][user]["y"]]
    assert pool.owners is not None
    assert pool.owners.tolist() == [
        user for user, n in zip(raw["users"], raw["num_samples"], strict=True) for _ in range(n)
    ]
    assert pool.classes == 62
    digits = load("femnist", tmp_path, digits_only=True)
    assert digits.classes == 10
    assert digits.portion == "27 of 805,263 samples, digits only"
    assert digits.y.tolist() == [label for label in pool.y.tolist() if label < 10]


def test_femnist_keeps_numbers_that_are_no_bytes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((2, 784)).tolist()
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "a.json").write_text(json.dumps(datafiles.leaf({"u": (x, [0, 1])})))
    np.testing.assert_allclose(load("femnist", tmp_path).x.reshape(2, 784).numpy(), np.array(x, np.float32))
    both = {"u": (x, [0, 1]), "v": ([[1 / 255] * 784], [2])}  # one user's are bytes, the other's are not
    (tmp_path / "femnist" / "a.json").write_text(json.dumps(datafiles.leaf(both)))
    np.testing.assert_allclose(load("femnist", tmp_path).x[2].numpy(), 1 / 255, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t["user_data"]["b"]["y"].__setitem__(2, 62),
            "label 2 of user 'b' is 62; labels are 0 to 61",
        ),
        (
            lambda t: t["user_data"]["b"]["x"][3].__setitem__(5, float("nan")),
            "pixel 5 of sample 3 of user 'b' is nan",
        ),
        (lambda t: t["user_data"]["b"]["x"][0].pop(), "sample 0 of user 'b' is not a list of 784"),
        (lambda t: t["num_samples"].__setitem__(0, 5), "num_samples 5; they must agree"),
        (lambda t: t["user_data"].pop("a"), "user 'a' has no lists x and y"),
        (lambda t: t.pop("users"), "not in LEAF's format"),
        (lambda t: t.update(users=["a", "b", "b"]), "lists the user 'b' twice"),
        (lambda t: t["user_data"]["b"]["x"].__setitem__(0, [[0.1, 0.9]] * 784), "sample 0 of user 'b' is not a list"),
        (lambda t: t["user_data"]["b"]["x"].__setitem__(1, ["0.5"] * 784), "sample 1 of user 'b' is not a list"),
        (lambda t: t["user_data"]["b"]["x"][2].__setitem__(3, 10**400), "has a number that is not between 0 and 1"),
        (
            lambda t: t.update(users=["\ud800"], num_samples=[8], user_data={"\ud800": t["user_data"]["a"]}),
            "client's name",
        ),
    ],
)
def test_femnist_says_what_is_wrong(change: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "femnist" / "all_data_0.json"
    datafiles.femnist(path)
    tables = json.loads(path.read_text())
    change(tables)  # type: ignore[operator]
    path.write_text(json.dumps(tables))
    with pytest.raises(EquipoiseError, match=message):
        load("femnist", tmp_path)


def test_one_file_packed_and_unpacked_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "femnist" / "all_data_0.json"
    datafiles.femnist(path)
    one = load("femnist", tmp_path)
    (tmp_path / "femnist" / "all_data_0.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert len(load("femnist", tmp_path)) == len(one)
    (tmp_path / "femnist" / "copy.json").write_bytes(path.read_bytes())
    with pytest.raises(EquipoiseError, match=r"copy\.json and all_data_0\.json both contain the user 'a'"):
        load("femnist", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples", "portion"),
    [
        ("mnist", 70_000, ""),
        ("digits-by-writer", 70_000, ""),
        ("cifar10", 20_000, "20,000 of 60,000 samples"),
        ("cifar100", 15_000, "15,000 of 60,000 samples"),
        ("medical-mnist", 9_000, "9,000 of 58,954 samples"),
        ("shakespeare", None, "own edition"),
        ("electricity", None, "203 of 321 clients, 1,000 of 26,304 moments"),
    ],
)
def test_the_real_data(name: str, samples: int | None, portion: str, real_data: Path) -> None:
    pool = load(name, real_data)
    assert samples in (None, len(pool))
    assert pool.portion == portion
    if pool.classes is not None and pool.y.ndim == 1:
        assert np.bincount(pool.y, minlength=pool.classes).min() > 0
    if name == "digits-by-writer":  # the known number of writers of MNIST's training part
        assert len(np.unique(pool.owners[:60_000])) == 539  # type: ignore[index]
    if name == "cifar100":
        assert np.bincount(pool.y).tolist() == [150] * 100
    if name == "electricity":
        assert len(np.unique(pool.owners)) == 203  # type: ignore[arg-type]
    if name == "shakespeare":
        assert len(np.unique(pool.owners)) == 790  # type: ignore[arg-type]
