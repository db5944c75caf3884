"""Small files in the formats of the publishers, and reading them, for tests of their readers."""

import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest
from equipoise.data.sources import SOURCES
from equipoise.data.sources.medical import CLASSES

WORDS = "Now is the winter of our discontent\nMade glorious summer by this sun of York; "


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    typed = array.astype(np.uint8) if kind == 8 else array.astype(">i4")
    return struct.pack(f">2xBB{array.ndim}I", kind, array.ndim, *array.shape) + typed.tobytes()


def mnist(folder: Path, labels: int = 10, train: int = 60, test: int = 20, packed: bool = False) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, n in (("train", train), ("t10k", test)):
        x, y = rng.integers(0, 256, (n, 28, 28)), np.arange(n) % labels
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x)))
        name = f"{part}-labels-idx1-ubyte"
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(y)))
        else:
            (folder / name).write_bytes(idx(y))


def digits(folder: Path) -> None:
    mnist(folder)
    for part, n, extra in (("train", 60, 0), ("test", 20, 15)):  # QMNIST's test part is longer than MNIST's
        rows = np.zeros((n + extra, 8))
        rows[:, 0] = np.arange(n + extra) % 10
        rows[:, 2] = 100 + np.arange(n + extra) % 4 + (10 if part == "test" else 0)
        (folder / f"qmnist-{part}-labels-idx2-int.gz").write_bytes(gzip.compress(idx(rows, 0x0C)))


def cifar(path: Path, fine: bool = False, n: int = 12, labels: int | None = None) -> np.ndarray:
    """Returns the images, as (n, 3, 32, 32) bytes in the order of the files."""
    rng = np.random.default_rng(0)
    names = ["train.bin", "test.bin"] if fine else [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    pixels = rng.integers(0, 256, (len(names) * n, 3 * 32 * 32), dtype=np.uint8)
    top = labels or (100 if fine else 10)
    with tarfile.open(path, "w:gz") as archive:
        for k, name in enumerate(names):
            rows = pixels[k * n : (k + 1) * n]
            label = (np.arange(n) * (7 if fine else 1) % top).astype(np.uint8)[:, None]
            coarse = np.full((n, 1), 19, np.uint8)
            data = np.concatenate([coarse, label, rows] if fine else [label, rows], axis=1).tobytes()
            info = tarfile.TarInfo(f"cifar/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return pixels.reshape(-1, 3, 32, 32)


def jpeg(value: int, side: int = 64) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((side, side), value, np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def medical(path: Path, each: int = 3, prefix: str = "Medical-MNIST-Classification-master/resized/") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for label, name in enumerate(CLASSES):
            for k in range(each):
                archive.writestr(f"{prefix}{name}/{k:06d}.jpeg", jpeg(40 * label + k))
        archive.writestr("images/logo.png", b"not a picture of the set")


def leaf(users: dict[str, tuple[list, list]]) -> dict:
    return {
        "users": list(users),
        "num_samples": [len(x) for x, _ in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }


def femnist(path: Path) -> None:
    rng = np.random.default_rng(0)
    users = {
        name: ((rng.integers(0, 256, (8 + i, 784)) / 255).tolist(), [(7 * k + i) % 62 for k in range(8 + i)])
        for i, name in enumerate("abc")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(leaf(users)))


def roles(path: Path, lengths: tuple[int, ...] = (900, 1500, 700)) -> dict[str, str]:
    texts = {f"richard_iii|ROLE {i}": (WORDS * 40)[i : i + n] for i, n in enumerate(lengths)}
    path.write_bytes(lzma.compress(json.dumps(texts).encode()))
    return texts


def leaf_windows(words: str) -> tuple[list, list]:
    return [words[k : k + 80] for k in range(len(words) - 80)], [words[k + 80] for k in range(len(words) - 80)]


def electricity(path: Path, clients: int = 4, hours: int = 200) -> np.ndarray:
    """The layout of the forecasting benchmarks; returns the series."""
    rng = np.random.default_rng(0)
    series = rng.integers(10, 500, (hours, clients))
    names = [*map(str, range(clients - 1)), "OT"]
    lines = ["date," + ",".join(names)]
    lines += [
        f"2016-07-{1 + h // 24:02d} {h % 24:02d}:00:00," + ",".join(map(str, row)) for h, row in enumerate(series)
    ]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    return series


def uci(path: Path, clients: int = 3, quarters: int = 400, zipped: bool = False) -> np.ndarray:
    """UCI's own text: semicolons, decimal commas, a value every 15 minutes."""
    series = np.random.default_rng(0).integers(100, 9999, (quarters, clients)) / 8
    lines = ['"";' + ";".join(f'"MT_{i + 1:03d}"' for i in range(clients))]
    for q, row in enumerate(series, 1):
        stamp = f'"2011-01-{1 + q // 96:02d} {q // 4 % 24:02d}:{q % 4 * 15:02d}:00"'
        lines.append(";".join([stamp, *(str(v).replace(".", ",") for v in row)]))
    text = "\r\n".join(lines) + "\r\n"
    if zipped:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("__MACOSX/._LD2011_2014.txt", b"\0\1")
            archive.writestr("LD2011_2014.txt", text)
    else:
        path.write_text(text, newline="")
    return series


def everything(folder: Path) -> dict[str, list[Path]]:
    """A small copy of each data set; the files of each."""
    folder.mkdir(parents=True, exist_ok=True)
    digits(folder / "mnist")
    mnist(folder / "fashion-mnist")
    cifar(folder / "cifar-10-binary.tar.gz")
    cifar(folder / "cifar-100-binary.tar.gz", fine=True)
    medical(folder / "medical-mnist.zip")
    femnist(folder / "femnist" / "all_data_0.json")
    roles(folder / "shakespeare-roles.json.xz")
    electricity(folder / "electricity.csv.gz")
    four = lambda name: sorted((folder / name).glob("t*"))  # noqa: E731
    return {
        "mnist": four("mnist"),
        "digits-by-writer": sorted((folder / "mnist").iterdir()),
        "fashion-mnist": four("fashion-mnist"),
        "cifar10": [folder / "cifar-10-binary.tar.gz"],
        "cifar100": [folder / "cifar-100-binary.tar.gz"],
        "medical-mnist": [folder / "medical-mnist.zip"],
        "femnist": [folder / "femnist" / "all_data_0.json"],
        "shakespeare": [folder / "shakespeare-roles.json.xz"],
        "electricity": [folder / "electricity.csv.gz"],
    }


def other_layouts(folder: Path) -> dict[str, list[Path]]:
    """Files of the data sets that are published in a second form, by data set; none of them packed but UCI's."""
    texts = roles(folder / "roles.json.xz", lengths=(300, 400))
    (folder / "shakespeare").mkdir()
    windows = {name: leaf_windows(words) for name, words in texts.items()}
    (folder / "shakespeare" / "all_data.json").write_text(json.dumps(leaf(windows)))
    uci(folder / "LD2011_2014.txt", quarters=200)
    uci(folder / "electricity.zip", quarters=200, zipped=True)
    (folder / "medical-mnist").mkdir()
    medical(folder / "pictures.zip", each=2, prefix="")
    with zipfile.ZipFile(folder / "pictures.zip") as archive:
        archive.extractall(folder / "medical-mnist")
    return {
        "shakespeare": [folder / "shakespeare" / "all_data.json"],
        "electricity": [folder / "LD2011_2014.txt"],
        "electricity zipped": [folder / "electricity.zip"],
        "medical-mnist": sorted((folder / "medical-mnist").glob("*/*.jpeg")),
    }


def load(name: str, folder: Path, split: tuple[float, float, float] = (0.7, 0.1, 0.2), **settings: object) -> Pool:
    return SOURCES[name](**settings).load(LoadRequest(folder, split=split))
