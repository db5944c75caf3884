"""Every data set in its publisher's format: what is read is what was written."""

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

from equipoise.data import text
from equipoise.data.pool import Pool
from equipoise.data.source import Request
from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from tests import datafiles


def load(name: str, folder: Path, split: tuple[float, float, float] = (0.7, 0.1, 0.2), **settings: object) -> Pool:
    return SOURCES[name](**settings).load(Request(folder, split=split))


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
    with pytest.raises(EquipoiseError, match="has 0 bytes, which is no whole number of records"):
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
    with pytest.raises(EquipoiseError, match=r"holds Hand/000001\.jpeg twice"):
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
        (b"GIF89a", "Hand/000007.jpeg is not a whole JPEG"),
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


def test_leafs_folders_hold_the_same_samples_and_are_read_once_in_the_order_of_time(tmp_path: Path) -> None:
    words = text.ALPHABET[1:] * 4
    x, y = datafiles.leaf_windows(words)
    folder = tmp_path / "shakespeare" / "data"
    for place, rows in (("all_data", range(len(x))), ("test", range(200, len(x))), ("train", range(200))):
        (folder / place).mkdir(parents=True)
        users = {"u": ([x[k] for k in rows], [y[k] for k in rows])}
        (folder / place / "a.json").write_text(json.dumps(datafiles.leaf(users)))
    pool = load("shakespeare", tmp_path, stride=1, predict="last", split=(1.0, 0.0, 0.0))
    assert [text.decode(row.numpy()) for row in pool.x] == x


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
        (lambda t: t["user_data"]["b"]["x"][2].__setitem__(3, 10**400), "holds a number that is not 0 to 1"),
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


def test_shakespeare_targets_are_the_next_characters(tmp_path: Path) -> None:
    texts = datafiles.roles(tmp_path / "shakespeare-roles.json.xz")
    pool = load("shakespeare", tmp_path)
    assert pool.owners is not None
    assert pool.part is not None
    assert pool.x.shape == pool.y.shape == (len(pool), 80)
    for row in range(len(pool)):
        words = texts[str(pool.owners[row])]
        window = text.decode(pool.x[row].numpy())
        assert window in words
        assert window[1:] == text.decode(pool.y[row, :-1].numpy())
        assert window + text.decode(pool.y[row, -1:].numpy()) in words
    assert set(pool.part.tolist()) == {0, 1, 2}
    last = load("shakespeare", tmp_path, predict="last", stride=1)
    assert last.y.ndim == 1
    assert len(last) > 60 * len(pool)


@pytest.mark.parametrize("settings", [{"stride": 5}, {"stride": 1}, {"stride": 7}, {"stride": 1, "predict": "last"}])
def test_no_character_that_is_tested_was_trained_on(settings: dict, tmp_path: Path) -> None:
    """Each character of the text is its own: with distinct ones, what is asked for in one part is in no other."""
    alphabet = text.ALPHABET[1:]
    assert len(set(alphabet)) == 95
    (tmp_path / "shakespeare-roles.json").write_text(json.dumps({"role": alphabet}))
    pool = load("shakespeare", tmp_path, window=5, **settings)
    assert pool.part is not None
    asked = [set(pool.y[torch.from_numpy(pool.part == k)].flatten().tolist()) for k in range(3)]
    assert all(asked)
    assert not asked[0] & asked[1]
    assert not asked[0] & asked[2]
    assert not asked[1] & asked[2]
    assert max(asked[0]) < min(asked[1])
    assert max(asked[1]) < min(asked[2])


def test_leafs_windows_are_the_same_text(tmp_path: Path) -> None:
    texts = datafiles.roles(tmp_path / "shakespeare-roles.json.xz")
    (tmp_path / "leaf" / "shakespeare").mkdir(parents=True)
    users = {name: datafiles.leaf_windows(words) for name, words in texts.items()}
    (tmp_path / "leaf" / "shakespeare" / "all_data.json").write_text(json.dumps(datafiles.leaf(users)))
    for settings in ({}, {"stride": 1, "predict": "last"}):
        ours, leafs = load("shakespeare", tmp_path, **settings), load("shakespeare", tmp_path / "leaf", **settings)
        assert torch.equal(ours.x, leafs.x)
        assert torch.equal(ours.y, leafs.y)
        assert np.array_equal(ours.part, leafs.part)  # type: ignore[arg-type]
    count = sum(len(words) - 80 for words in texts.values())
    assert leafs.portion == f"{count:,} of 4,226,158 samples"
    assert ours.portion == "own edition"


def test_windows_do_not_reach_over_gaps_in_leafs_samples(tmp_path: Path) -> None:
    x, y = datafiles.leaf_windows(text.ALPHABET[1:] * 3)
    keep = [*range(20), *range(100, 130)]
    (tmp_path / "shakespeare").mkdir()
    users = {"u": ([x[k] for k in keep], [y[k] for k in keep])}
    (tmp_path / "shakespeare" / "a.json").write_text(json.dumps(datafiles.leaf(users)))
    pool = load("shakespeare", tmp_path, stride=1, predict="last", split=(1.0, 0.0, 0.0))
    assert [text.decode(row.numpy()) for row in pool.x] == users["u"][0]
    assert [text.decode(row[None].numpy()) for row in pool.y] == users["u"][1]


@pytest.mark.parametrize("kept", [range(0, 350, 1), [k for k in range(350) if k % 90], [*range(200, 350), *range(200)]])
@pytest.mark.parametrize("predict", ["every", "last"])
def test_nothing_is_asked_for_twice_however_leafs_windows_come(kept: list, predict: str, tmp_path: Path) -> None:
    """A text of characters that can be told apart (by their place in a pair): targets of one part are in no other."""
    words = "".join(chr(33 + k // 90) + chr(33 + k % 90) for k in range(215))
    x, y = datafiles.leaf_windows(words)
    (tmp_path / "shakespeare").mkdir()
    users = {"u": ([x[k] for k in kept], [y[k] for k in kept])}
    (tmp_path / "shakespeare" / "a.json").write_text(json.dumps(datafiles.leaf(users)))
    pool = load("shakespeare", tmp_path, stride=1, predict=predict)
    assert pool.part is not None
    asked: list[set[int]] = [set(), set(), set()]
    for row, target, part in zip(pool.x, pool.y.reshape(len(pool), -1), pool.part, strict=True):
        place = words.index(text.decode(row.numpy()))
        first = place + 80 - target.numel() + 1
        assert words[first : first + target.numel()] == text.decode(target.numpy())
        asked[part] |= set(range(first, first + target.numel()))
    assert asked[0]
    assert asked[2]
    assert not asked[0] & asked[1]
    assert not asked[0] & asked[2]
    assert not asked[1] & asked[2]


def test_one_file_packed_and_unpacked_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "femnist" / "all_data_0.json"
    datafiles.femnist(path)
    one = load("femnist", tmp_path)
    (tmp_path / "femnist" / "all_data_0.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert len(load("femnist", tmp_path)) == len(one)
    (tmp_path / "femnist" / "copy.json").write_bytes(path.read_bytes())
    with pytest.raises(EquipoiseError, match=r"copy\.json and all_data_0\.json both hold the user 'a'"):
        load("femnist", tmp_path)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shakespeare-roles.json").write_text('{"a": "one", "a": "two"}')
    with pytest.raises(EquipoiseError, match="the key 'a' stands twice"):
        load("shakespeare", tmp_path)


def test_roles_too_short_are_left_out_and_said(tmp_path: Path) -> None:
    datafiles.roles(tmp_path / "shakespeare-roles.json.xz", lengths=(900, 60, 80))
    pool = load("shakespeare", tmp_path)
    assert len(set(pool.owners)) == 1  # type: ignore[arg-type]
    assert "2 roles are left out" in pool.notes[0]
    datafiles.roles(tmp_path / "shakespeare-roles.json.xz", lengths=(30,))
    with pytest.raises(EquipoiseError, match="no role is long enough"):
        load("shakespeare", tmp_path)


def test_unknown_characters_have_a_number_of_their_own() -> None:
    assert text.encode("a\n~é\N{GRINNING FACE}\x07").tolist() == [66 + 1, 1, text.SYMBOLS - 1, 0, 0, 0]
    assert text.decode(text.encode(text.ALPHABET)) == text.ALPHABET


def test_electricity_windows_and_scaling(tmp_path: Path) -> None:
    series = datafiles.electricity(tmp_path / "electricity.csv.gz")
    pool = load("electricity", tmp_path, split=(0.6, 0.2, 0.2), window=10, horizon=2)
    assert pool.portion == "4 of 321 clients, 200 of 26,304 moments"
    assert pool.owners is not None
    assert pool.part is not None
    for column, name in enumerate(["0", "1", "2", "OT"]):
        mine = pool.owners == name
        # 189 windows: 113, 38 and 38; those whose targets lie on both sides of a cut are dropped.
        low, high = series[:123, column].min(), series[:123, column].max()  # by the training part alone
        scaled = (series[:, column] - low) / (high - low)
        x, y, part = pool.x[mine].numpy(), pool.y[mine].numpy(), pool.part[mine]
        starts = [t for t in range(10, 199) if t not in (122, 160)]
        np.testing.assert_allclose(x, [scaled[t - 10 : t] for t in starts], atol=1e-6)
        np.testing.assert_allclose(y, [scaled[t : t + 2] for t in starts], atol=1e-6)
        assert part.tolist() == [0 if t < 123 else 1 if t < 161 else 2 for t in starts]
    standard = load("electricity", tmp_path, split=(0.6, 0.2, 0.2), scale="standard", window=1)
    first = (standard.owners == "0") & (standard.part == 0)
    past = np.concatenate([standard.x[first].numpy()[:1, 0], standard.y[first].numpy()[:, 0]])
    assert abs(past.mean()) < 1e-5
    assert abs(past.std() - 1) < 1e-5


@pytest.mark.parametrize("zipped", [True, False])
def test_ucis_quarter_hours_with_decimal_commas(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / ("electricity.zip" if zipped else "LD2011_2014.txt")
    series = datafiles.uci(path, zipped=zipped)
    hourly = series.reshape(-1, 4, 3).mean(1)
    for settings, truth in (({}, hourly), ({"hourly": False}, series)):
        pool = load("electricity", tmp_path, split=(1.0, 0.0, 0.0), window=4, **settings)
        mine = pool.owners == "MT_002"
        low, high = truth[:, 1].min(), truth[:, 1].max()
        np.testing.assert_allclose(pool.y[mine].numpy()[:, 0], (truth[4:, 1] - low) / (high - low), atol=1e-5)


@pytest.mark.parametrize(("row", "cell"), [(30, "2016-07-02 09:00:00"), (40, "garbage"), (20, "2016-07-01 02:00:00")])
def test_every_moment_follows_the_one_before(row: int, cell: str, tmp_path: Path) -> None:
    """Were rows out of order, the future would be trained on."""
    rows = [f"2016-07-{1 + h // 24:02d} {h % 24:02d}:00:00,{h},{h + 1}" for h in range(48)]
    rows[row] = f"{cell},1,2"
    (tmp_path / "electricity.csv").write_text("\n".join(["date,0,OT", *rows]))
    with pytest.raises(EquipoiseError, match=f"row {row + 2}: '{cell}' is"):
        load("electricity", tmp_path)


def test_lines_ends_and_marks_of_other_systems(tmp_path: Path) -> None:
    rows = [f"2016-07-{1 + h // 24:02d} {h % 24:02d}:00:00,{h % 7},{h % 5}" for h in range(48)]
    plain = "\n".join(["date,0,OT", *rows])
    (tmp_path / "electricity.csv").write_text(plain)
    one = load("electricity", tmp_path)
    (tmp_path / "electricity.csv").write_bytes(b"\xef\xbb\xbf" + plain.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    assert torch.equal(load("electricity", tmp_path).x, one.x)


def test_a_table_that_unpacks_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    head = b"date,0,OT\n2016-07-01 00:00:00,1,2\n2016-07-01 01:00:00,1,2\n"
    (tmp_path / "electricity.csv.gz").write_bytes(gzip.compress(head + b"\n" * 50_000_000))
    with pytest.raises(EquipoiseError):  # in no time: the empty rows are not walked through
        load("electricity", tmp_path)
    (tmp_path / "mnist").mkdir()
    datafiles.everything(tmp_path / "whole")
    path = tmp_path / "whole" / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(100_000_000)))
    with pytest.raises(EquipoiseError, match="more than the 47040 bytes"):
        load("mnist", tmp_path / "whole")


def test_loads_before_the_first_and_dead_clients_are_no_data(tmp_path: Path) -> None:
    rows = [f"2016-07-01 {h:02d}:00:00,{0 if h < 5 else 7 + h % 3},0,{h}" for h in range(24)]
    (tmp_path / "electricity.csv").write_text("\n".join(["date,a,b,OT", *rows]))
    pool = load("electricity", tmp_path, window=2, split=(0.5, 0.25, 0.25))
    assert set(pool.owners) == {"a", "OT"}  # type: ignore[arg-type]
    assert (pool.owners == "a").sum() == 24 - 5 - 2
    assert "1 clients are left out" in pool.notes[0]
    late = [f"2016-07-01 {h:02d}:00:00,{0 if h < 22 else h},{h}" for h in range(24)]
    (tmp_path / "electricity.csv").write_text("\n".join(["date,late,OT", *late]))
    assert set(load("electricity", tmp_path, window=2).owners) == {"OT"}


@pytest.mark.parametrize(
    ("cell", "shown"),
    [*((c, repr(c)) for c in ("NaN", "", "inf", "12x", "#3", "1_000", "1e39"))],
)
def test_a_bad_cell_is_named_with_row_and_column(cell: str, shown: str, tmp_path: Path) -> None:
    rows = [f"2016-07-{1 + h // 24:02d} {h % 24:02d}:00:00,{h},{h + 1},{h + 2}" for h in range(48)]
    rows[30] = f"2016-07-02 06:00:00,1,{cell},3"
    (tmp_path / "electricity.csv").write_text("\n".join(["date,0,1,OT", *rows]))
    with pytest.raises(EquipoiseError, match=rf"row 32, column '1': {shown} is not a finite number"):
        load("electricity", tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["date,0,OT", "2016-07-01 00:00:00,1,2", "2016-07-01 01:00:00,1"], "row 3: 1 values for 2 clients"),
        (["date,0,OT", "2016-07-01 00:00:00,1,2", "2016-07-01 00:07:00,1,2"], "a value every 7 minutes"),
        (["date,0,OT", "yesterday,1,2"], "row 2: 'yesterday' is not a date"),
        (["date,0,0", "2016-07-01 00:00:00,1,2"], "names a client twice"),
        (["1,2,3"], "does not begin with a line of names"),
        (["date,0,OT", *(f"2016-07-01 {h:02d}:00:00,{h},{h}" for h in range(9))], "no client can be learned from"),
        (["date,0", *(f"2016-07-{d:02d} {h:02d}:00:00,7" for d in (1, 2) for h in range(24))], "values that change"),
        (["date,0", "2016-07-01 00:00:30,1"], "not a date and time in whole minutes"),
        (["date,0", "2016-07-01 00:00:00+01:00,1"], "not a date and time in whole minutes"),
        (["date,0,OT", "2016-07-01 00:00:00,1,2", "", "2016-07-01 01:00:00,1,2"], "row 3 is empty"),
        (["date,\x07,OT", "2016-07-01 00:00:00,1,2"], "cannot be a client's name"),
        (["date,0,OT" + "," * 70_000], "no table of loads is that long"),
    ],
)
def test_electricity_says_what_is_wrong(lines: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "electricity.csv").write_text("\n".join(lines))
    with pytest.raises(EquipoiseError, match=message):
        load("electricity", tmp_path)


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
