"""FEMNIST: letters and digits by writer, in LEAF's JSON."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from equipoise.data.cache import Arrays, cached
from equipoise.data.pool import Pool, as_images
from equipoise.data.source import DataProgress, DatasetStatus, LoadRequest, Source, missing_file, portion
from equipoise.data.sources.leaf import count_samples, each_user, leaf_files
from equipoise.data.text_encoding import names_from_bytes, names_to_bytes
from equipoise.errors import EquipoiseError

_CLASSES = 62
_WHOLE = 805_263


class FEMNIST(Source):
    """Handwritten digits and letters by writer, 28x28 grey, 62 classes, in LEAF's JSON."""

    paper: ClassVar[str] = "Caldas et al., LEAF: A Benchmark for Federated Settings, 2018"
    how_to_get: ClassVar[str] = (
        "LEAF creates it: in its repository (github.com/TalwalkarLab/leaf) run data/femnist/preprocess.sh -s niid "
        "--sf 1.0 -k 0 -t sample, and copy its JSON files into the folder femnist of the data folder"
    )

    digits_only: bool = False
    "whether to keep only the ten digits, as in FLAME"

    def load(self, ask: LoadRequest) -> Pool:
        folder = ask.folder / "femnist"
        paths = leaf_files(folder)
        if not paths:
            raise missing_file("all_data_0.json (or any other .json)", [folder], type(self))
        arrays = cached("femnist", paths, lambda: _decode(paths, ask.progress))
        x, y, owner = arrays["x"], arrays["y"].astype(np.int64), arrays["owner"]
        part = portion(len(y), _WHOLE)
        if self.digits_only:
            part = ", ".join(filter(None, (part, "digits only")))
            keep = y < 10
            x, y, owner = x[keep], y[keep], owner[keep]
            if not len(y):
                raise EquipoiseError("data.digits_only = true leaves no samples: these files contain no digits")
        names = tuple(names_from_bytes(arrays["names"]))
        classes = 10 if self.digits_only else _CLASSES
        return Pool(as_images(x.reshape(-1, 28, 28)), torch.from_numpy(y), classes, owner, names, portion=part)

    def look(self, folder: Path) -> DatasetStatus | None:
        paths = leaf_files(folder / "femnist")
        return DatasetStatus(folder / "femnist", count_samples(paths), _WHOLE) if paths else None


def _decode(paths: list[Path], progress: DataProgress) -> Arrays:
    xs: list[np.ndarray] = []
    ys: list[np.ndarray] = []
    owner: list[np.ndarray] = []
    names: dict[str, int] = {}
    for path, user, x, y in each_user(paths, progress):
        if not x:
            continue
        xs.append(_compact(_images(path, user, x)))
        ys.append(_labels(path, user, y))
        owner.append(np.full(len(x), names.setdefault(user, len(names)), np.int32))
    if not xs:
        raise EquipoiseError(f"{paths[0].parent} contains no samples")
    return {
        "x": _joined(xs),
        "y": np.concatenate(ys),
        "owner": np.concatenate(owner),
        "names": names_to_bytes(names),
    }


def _images(path: Path, user: str, x: list[Any]) -> np.ndarray:
    for k, image in enumerate(x):
        if not isinstance(image, list) or len(image) != 784 or not set(map(type, image)) <= {int, float}:
            raise EquipoiseError(f"{path}: sample {k} of user {user!r} is not a list of 784 numbers")
    try:
        images = np.array(x, dtype=np.float32)
    except OverflowError:
        raise EquipoiseError(f"{path}: a sample of user {user!r} has a number that is not between 0 and 1") from None
    bad = ~((images >= 0) & (images <= 1))  # also true for NaN
    if bad.any():
        k, pixel = (int(i) for i in np.argwhere(bad)[0])
        raise EquipoiseError(
            f"{path}: pixel {pixel} of sample {k} of user {user!r} is {images[k, pixel]}; it must be 0 to 1"
        )
    return images


def _labels(path: Path, user: str, y: list[Any]) -> np.ndarray:
    for k, label in enumerate(y):
        if type(label) is not int or not 0 <= label < _CLASSES:
            raise EquipoiseError(f"{path}: label {k} of user {user!r} is {label!r}; labels are 0 to {_CLASSES - 1}")
    return np.array(y, dtype=np.uint8)


def _compact(images: np.ndarray) -> np.ndarray:
    """Return the images as bytes, a quarter of the size, if that loses nothing; LEAF's numbers are bytes / 255."""
    scaled = np.rint(255 * images)
    return scaled.astype(np.uint8) if np.abs(255 * images - scaled).max() < 1e-3 else images


def _joined(xs: list[np.ndarray]) -> np.ndarray:
    """Join all images: as bytes if all of them are, else as numbers from 0 to 1."""
    if all(x.dtype == np.uint8 for x in xs):
        return np.concatenate(xs)
    return np.concatenate([x / np.float32(255) if x.dtype == np.uint8 else x for x in xs])
