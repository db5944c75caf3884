"""Handwritten digits by writer: all of MNIST if its files are there, else an excerpt that comes with the package."""

from importlib.resources import files
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from equipoise.data.cache import Arrays, cached
from equipoise.data.downloads import Remote
from equipoise.data.pool import Pool, as_images
from equipoise.data.source import DatasetStatus, LoadRequest, MissingFile, Source, portion
from equipoise.data.sources.mnist import MNIST, WHOLE, count_idx, find_idx, mnist_files, read_idx, read_mnist
from equipoise.errors import EquipoiseError

_QMNIST = "https://github.com/facebookresearch/qmnist/raw/master"
_SUMS = {"train": "0058f8dd561b90ffdd0f734c6a30e5e4", "test": "5b5b05890a5e13444e108efe57b788aa"}


class DigitsByWriter(Source):
    """Handwritten digits by writer, 28x28 grey, 10 classes: MNIST with QMNIST's writers, or 80 writers of it."""

    paper: ClassVar[str] = "MNIST (LeCun et al., 1998) with the writers of QMNIST (Yadav and Bottou, 2019)"
    bundled: ClassVar[bool] = True
    remotes: ClassVar[tuple[Remote, ...]] = MNIST.remotes + tuple(
        Remote(f"mnist/qmnist-{part}-labels-idx2-int.gz", (f"{_QMNIST}/qmnist-{part}-labels-idx2-int.gz",), md5)
        for part, md5 in _SUMS.items()
    )

    extent: Literal["auto", "full", "excerpt"] = "auto"
    "full: MNIST's and QMNIST's files; excerpt: what comes with the package; auto: full if the files are there"

    def load(self, ask: LoadRequest) -> Pool:
        if self.extent == "excerpt":
            return load_excerpt()
        try:
            paths = _paths(ask.folder)
        except MissingFile:
            if self.extent == "full":
                raise
            return load_excerpt()
        arrays = cached("digits-by-writer", paths, lambda: _decode(paths))
        return _pool(arrays["x"], arrays["y"], arrays["writer"], portion(len(arrays["y"]), WHOLE))

    def look(self, folder: Path) -> DatasetStatus | None:
        try:
            paths = _paths(folder)
        except MissingFile:
            return None
        counts = [count_idx(path) for path in paths]
        return DatasetStatus(paths[0].parent, counts[0] + counts[2], WHOLE)


def _paths(folder: Path) -> list[Path]:
    folders = [folder / "mnist", folder]
    labels = [find_idx(folders, f"qmnist-{part}-labels-idx2-int", DigitsByWriter) for part in ("train", "test")]
    return [*mnist_files(folders, DigitsByWriter), *labels]


def _decode(paths: list[Path]) -> Arrays:
    xs, ys, writers = [], [], []
    for images, labels, extended in ((*paths[:2], paths[4]), (*paths[2:4], paths[5])):
        x, y = read_mnist(images, labels)
        rows = read_idx(extended)
        # The first rows correspond to MNIST's images one to one: class, NIST series, writer, and more.
        if rows.ndim != 2 or rows.shape[1] < 3 or len(rows) < len(y) or (rows[: len(y), 0] != y).any():
            raise EquipoiseError(f"{extended} does not belong to {labels}: its first column has other digits")
        xs.append(x)
        ys.append(y)
        writers.append(rows[: len(y), 2].astype(np.int32))
    return {"x": np.concatenate(xs), "y": np.concatenate(ys), "writer": np.concatenate(writers)}


def _pool(x: np.ndarray, y: np.ndarray, writer: np.ndarray, part: str) -> Pool:
    known, code = np.unique(writer, return_inverse=True)
    names = tuple(f"writer-{w:04d}" for w in known)
    return Pool(as_images(x), torch.from_numpy(y.astype(np.int64)), classes=10, owner=code, names=names, portion=part)


def load_excerpt() -> Pool:
    """Load the excerpt that comes with the package."""
    with files("equipoise.data").joinpath("digits-by-writer.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        return _pool(arrays["x"], arrays["y"], arrays["writer"], "excerpt of 80 writers")
