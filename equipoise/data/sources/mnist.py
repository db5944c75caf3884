"""MNIST and Fashion-MNIST, in the IDX files that their publishers provide."""

import struct
from math import prod
from pathlib import Path
from typing import BinaryIO, ClassVar

import numpy as np
import torch

from equipoise.data.archives import archive_errors, first_existing, opened
from equipoise.data.cache import Arrays, cached
from equipoise.data.downloads import Remote
from equipoise.data.pool import Pool, as_images
from equipoise.data.source import DatasetStatus, LoadRequest, MissingFile, Source, missing_file, portion
from equipoise.errors import EquipoiseError

_TYPES = {0x08: ">u1", 0x0C: ">i4"}
WHOLE = 70_000
"""The number of samples of the full data set."""
_LARGEST = 256 << 20  # bytes; the largest of these files has 47 million


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file, packed or not."""
    with opened(path) as file:
        shape, kind, expected = _header(path, file)
        data = file.read(expected + 1)  # a file that unpacks to more than its header says is not read to its end
    if len(data) != expected:
        more = "more than" if len(data) > expected else f"{len(data)} bytes, not"
        raise EquipoiseError(f"{path} holds {more} the {expected} bytes of its header; remove it and fetch it again")
    return np.frombuffer(data, dtype=kind).reshape(shape)


def count_idx(path: Path) -> int:
    """Return the number of entries; an error if the file is not as long as its header says."""
    with opened(path) as file:
        shape, _, expected = _header(path, file)
    length = 4 + 4 * len(shape) + expected
    if path.suffix == ".gz":  # gzip ends with the length of the unpacked content
        with archive_errors(path), path.open("rb") as packed:
            packed.seek(-4, 2)
            there = int.from_bytes(packed.read(4), "little")
    else:
        there = path.stat().st_size
    if there != length % 2**32:
        raise EquipoiseError(f"{path} is not as long as its header says; remove it and fetch it again")
    return int(shape[0])


def _header(path: Path, file: BinaryIO) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return the shape, the dtype, and the number of bytes of the content."""
    data = file.read(4)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES or not data[3]:
        raise EquipoiseError(f"{path} is not an IDX file: it begins with {data.hex()}, not with 0000080x or 00000c0x")
    sizes = file.read(4 * data[3])
    if len(sizes) < 4 * data[3]:
        raise EquipoiseError(f"{path} ends within its header; remove it and fetch it again")
    shape, kind = struct.unpack(f">{data[3]}I", sizes), np.dtype(_TYPES[data[2]])
    expected = prod(shape) * kind.itemsize
    if expected > _LARGEST:
        raise EquipoiseError(f"the header of {path} claims {expected} bytes, which cannot be right; fetch it again")
    return shape, kind, expected


def find_idx(folders: list[Path], name: str, cls: type[Source]) -> Path:
    """Return the path of a file, packed or not.

    Args:
        folders: the folders to search.
        name: the name of the unpacked file.
        cls: the source that needs it, for the error message.
    """
    path = first_existing(folders, [name, f"{name}.gz"])
    if path is None:
        raise missing_file(f"{name}.gz", folders, cls)
    return path


def read_mnist(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the images and the labels of one part, and check that they belong together."""
    x, y = read_idx(images), read_idx(labels)
    if x.dtype != np.uint8 or x.shape[1:] != (28, 28):
        raise EquipoiseError(
            f"{images} has entries of shape {x.shape[1:]} and type {x.dtype}; they must be (28, 28) bytes"
        )
    if len(x) != len(y) or y.ndim != 1:
        raise EquipoiseError(f"{labels} has {len(y)} labels for {len(x)} images; the files do not belong together")
    if y.size and y.max() > 9:
        raise EquipoiseError(f"{labels} has the label {y.max()}; labels are 0 to 9")
    return x, y


def mnist_files(folders: list[Path], cls: type[Source]) -> list[Path]:
    """Return the paths of images and labels of the training part, then of the test part."""
    names = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    return [find_idx(folders, name, cls) for name in names]


def mnist_remotes(folder: str, base: str, sums: tuple[str, str, str, str]) -> tuple[Remote, ...]:
    """Return the four files of a data set in MNIST's layout.

    Args:
        folder: the folder of the data set in the data folder.
        base: the address of the publisher's folder.
        sums: the md5 checksums of the training images and labels, and of the test images and labels.
    """
    names = [
        *("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
        *("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
    ]
    return tuple(Remote(f"{folder}/{n}", (f"{base}/{n}",), md5) for n, md5 in zip(names, sums, strict=True))


class _FourFiles(Source):
    folder: ClassVar[str]

    def _folders(self, data: Path) -> list[Path]:
        # Both data sets have the same file names, so only MNIST's files may be in the data folder itself.
        return [data / self.folder, *([data] if self.folder == "mnist" else [])]

    def load(self, ask: LoadRequest) -> Pool:
        paths = mnist_files(self._folders(ask.folder), type(self))

        def decode() -> Arrays:
            train, test = read_mnist(*paths[:2]), read_mnist(*paths[2:])
            return {"x": np.concatenate([train[0], test[0]]), "y": np.concatenate([train[1], test[1]])}

        arrays = cached(self.folder, paths, decode)
        y = torch.from_numpy(arrays["y"].astype(np.int64))
        return Pool(as_images(arrays["x"]), y, classes=10, portion=portion(len(y), WHOLE))

    def look(self, folder: Path) -> DatasetStatus | None:
        try:
            paths = mnist_files(self._folders(folder), type(self))
        except MissingFile:
            return None
        counts = [count_idx(path) for path in paths]
        return DatasetStatus(paths[0].parent, counts[0] + counts[2], WHOLE)


class MNIST(_FourFiles):
    """70,000 handwritten digits, 28x28 grey, 10 classes, in IDX files."""

    paper: ClassVar[str] = "LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998"
    folder: ClassVar[str] = "mnist"
    remotes: ClassVar[tuple[Remote, ...]] = mnist_remotes(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    )


class FashionMNIST(_FourFiles):
    """70,000 images of clothing, 28x28 grey, 10 classes, in IDX files."""

    paper: ClassVar[str] = "Xiao et al., Fashion-MNIST, 2017"
    folder: ClassVar[str] = "fashion-mnist"
    remotes: ClassVar[tuple[Remote, ...]] = mnist_remotes(
        "fashion-mnist",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    )
