"""CIFAR-10 and CIFAR-100 in their binary version, where a record is one or two label bytes and 3 x 32 x 32 pixels."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from equipoise.data.archives import content, first_existing, tar_members, tar_sizes
from equipoise.data.cache import Arrays, cached
from equipoise.data.downloads import Remote
from equipoise.data.pool import Pool, as_images
from equipoise.data.source import DatasetStatus, LoadRequest, Source, missing_file, portion
from equipoise.errors import EquipoiseError

_PIXELS = 3 * 32 * 32
_WHOLE = 60_000
_LARGEST = 50_000 * (2 + _PIXELS)
_HOME = "https://www.cs.toronto.edu/~kriz"


class _CIFAR(Source):
    archive: ClassVar[str]
    inside: ClassVar[str]
    members: ClassVar[tuple[str, ...]]
    label_bytes: ClassVar[int]
    classes: ClassVar[int]

    def _archive(self, folder: Path) -> Path | None:
        return first_existing([folder, folder / self.inside], [self.archive])

    def _unpacked(self, folder: Path) -> list[Path] | None:
        paths = [folder / self.inside / name for name in self.members]
        return paths if all(path.is_file() for path in paths) else None

    def load(self, ask: LoadRequest) -> Pool:
        path, unpacked = self._archive(ask.folder), self._unpacked(ask.folder)
        if path is None and unpacked is None:
            raise missing_file(self.archive, [ask.folder], type(self))
        paths = [path] if path is not None else unpacked or []

        def decode() -> Arrays:
            if path is None:
                return self._decode(ask.folder / self.inside, {p.name: content(p, _LARGEST) for p in paths})
            return self._decode(path, tar_members(path, self.members, _LARGEST))

        arrays = cached(self.archive.split(".")[0], paths, decode)
        y = torch.from_numpy(arrays["y"].astype(np.int64))
        return Pool(as_images(arrays["x"]), y, classes=self.classes, portion=portion(len(y), _WHOLE))

    def _decode(self, path: Path, members: dict[str, bytes]) -> Arrays:
        xs, ys = [], []
        record = self.label_bytes + _PIXELS
        for name in self.members:
            data = members.get(name)
            if data is None:
                raise EquipoiseError(f"{path} has no {name}; it is not the binary version, or it is incomplete")
            if not data or len(data) % record:
                raise EquipoiseError(
                    f"{path}: {name} has {len(data)} bytes, which is not a multiple of the {record} of a record"
                )
            rows = np.frombuffer(data, np.uint8).reshape(-1, record)
            labels = rows[:, self.label_bytes - 1]  # in CIFAR-100 the coarse label precedes the fine one
            if labels.max() >= self.classes:
                raise EquipoiseError(f"{path}: {name} has the label {labels.max()}; labels are 0 to {self.classes - 1}")
            xs.append(rows[:, self.label_bytes :])
            ys.append(labels)
        return {"x": np.concatenate(xs).reshape(-1, 3, 32, 32), "y": np.concatenate(ys)}

    def look(self, folder: Path) -> DatasetStatus | None:
        path, unpacked = self._archive(folder), self._unpacked(folder)
        if path is not None:
            sizes = tar_sizes(path, self.members, _LARGEST)
        elif unpacked is not None:
            sizes, path = {p.name: p.stat().st_size for p in unpacked}, folder / self.inside
        else:
            return None
        return DatasetStatus(path, sum(sizes.values()) // (self.label_bytes + _PIXELS), _WHOLE)


class CIFAR10(_CIFAR):
    """60,000 small colour photographs, 32x32, 10 classes, in the binary version."""

    paper: ClassVar[str] = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
    archive: ClassVar[str] = "cifar-10-binary.tar.gz"
    inside: ClassVar[str] = "cifar-10-batches-bin"
    members: ClassVar[tuple[str, ...]] = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
    label_bytes: ClassVar[int] = 1
    classes: ClassVar[int] = 10
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(archive, (f"{_HOME}/{archive}",), "c32a1d4ab5d03f1284b67883e8d87530"),
    )


class CIFAR100(_CIFAR):
    """60,000 small colour photographs, 32x32, 100 (fine) classes, in the binary version."""

    paper: ClassVar[str] = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
    archive: ClassVar[str] = "cifar-100-binary.tar.gz"
    inside: ClassVar[str] = "cifar-100-binary"
    members: ClassVar[tuple[str, ...]] = ("train.bin", "test.bin")
    label_bytes: ClassVar[int] = 2
    classes: ClassVar[int] = 100
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(archive, (f"{_HOME}/{archive}",), "03b5dce01913d631647c71ecec9e9cb8"),
    )
