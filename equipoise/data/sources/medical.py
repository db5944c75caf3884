"""Medical MNIST: one folder of JPEG files per class, in a zip archive or unpacked."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path, PurePath, PurePosixPath
from typing import ClassVar, Literal

import numpy as np
import torch
from PIL import Image

from equipoise.data.archives import archive_errors, check_zip, first_existing, open_zip
from equipoise.data.cache import Arrays, cached
from equipoise.data.downloads import Remote
from equipoise.data.pool import Pool, as_images
from equipoise.data.source import DataProgress, DatasetStatus, LoadRequest, Source, missing_file, portion
from equipoise.errors import EquipoiseError

CLASSES = ("AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT")
_WHOLE = 58_954
_SIDE = 64
_ENDINGS = (".jpeg", ".jpg")
_LARGEST = 1 << 20  # bytes of one JPEG file; the real ones have about two thousand
_ZIPS = ["medical-mnist.zip", "Medical-MNIST-Classification-master.zip"]

Picture = tuple[int, str, Callable[[], bytes]]  # class, name, and how to get its bytes


class MedicalMNIST(Source):
    """58,954 radiological images, 64x64 grey, 6 classes, as JPEG files in one folder per class."""

    paper: ClassVar[str] = "Polanco Lozano, Medical MNIST Classification, 2017"
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            "medical-mnist.zip",
            ("https://github.com/apolanco3225/Medical-MNIST-Classification/archive/refs/heads/master.zip",),
        ),
    )

    channels: Literal[1, 3] = 1
    "number of channels; 1: grey, as they are; 3: the grey value three times, for models that expect colour"

    def load(self, ask: LoadRequest) -> Pool:
        path = _find(ask.folder)
        if path is None:
            raise missing_file(_ZIPS[0], [ask.folder], type(self))
        # The cache must see changes of single files, which a folder's own time does not show.
        files = sorted(p for p in path.glob("*/*") if p.is_file()) if path.is_dir() else [path]
        arrays = cached("medical-mnist", files, lambda: _decode(path, ask.progress))
        x = as_images(arrays["x"])
        if self.channels == 3:
            x = x.repeat(1, 3, 1, 1)
        y = torch.from_numpy(arrays["y"].astype(np.int64))
        return Pool(x, y, classes=len(CLASSES), portion=portion(len(y), _WHOLE))

    def look(self, folder: Path) -> DatasetStatus | None:
        path = _find(folder)
        if path is None:
            return None
        with ExitStack() as stack:
            return DatasetStatus(path, len(_pictures(path, stack)), _WHOLE)

    def look_at(self, path: Path) -> DatasetStatus:
        with ExitStack() as stack, archive_errors(path):
            pictures = _pictures(path, stack, check=True)
            for _, _, read in pictures:
                read()  # zipfile compares each file with its checksum in the archive
            return DatasetStatus(path, len(pictures), _WHOLE)


def _find(folder: Path) -> Path | None:
    zipped = first_existing([folder, folder / "medical-mnist"], _ZIPS)
    unpacked = [folder / "medical-mnist", folder / "medical-mnist" / "resized"]
    return zipped or next((p for p in unpacked if any((p / name).is_dir() for name in CLASSES)), None)


def _pictures(path: Path, stack: ExitStack, check: bool = False) -> list[Picture]:
    """Return all pictures in a fixed order. A file's folder is its class; files in other folders are ignored.

    Args:
        path: the archive or folder.
        stack: closes the archive.
        check: whether the other files of the archive are compared with their checksums.
    """
    found: list[Picture] = []
    if path.is_dir():
        for file in path.glob("*/*"):
            if _is_picture(file) and file.is_file():
                found.append((CLASSES.index(file.parent.name), file.name, file.read_bytes))
    else:
        archive = stack.enter_context(open_zip(path))
        pictures = set()
        for info in archive.infolist():
            name = PurePosixPath(info.filename)
            if _is_picture(name) and not info.is_dir():
                if info.file_size > _LARGEST:
                    raise EquipoiseError(f"{path}: {info.filename} is {info.file_size} bytes, too many for a picture")
                read = lambda info=info: archive.read(info)  # noqa: E731
                found.append((CLASSES.index(name.parent.name), name.name, read))
                pictures.add(info.filename)
        if check:
            check_zip(path, archive, without=pictures)
    if not found:
        raise EquipoiseError(f"{path} contains no JPEG files in folders named {', '.join(CLASSES)}")
    found.sort(key=lambda picture: picture[:2])
    for one, two in pairwise(found):
        if one[:2] == two[:2]:
            raise EquipoiseError(f"{path} contains {CLASSES[one[0]]}/{one[1]} twice; remove one of them")
    return found


def _is_picture(path: PurePath) -> bool:
    """Tell whether a file is a picture of the set; macOS adds files to archives that only look like one."""
    hidden = path.name.startswith(".") or "__MACOSX" in path.parts
    return path.parent.name in CLASSES and path.suffix.lower() in _ENDINGS and not hidden


def _decode(path: Path, progress: DataProgress) -> Arrays:
    with ExitStack() as stack:
        pictures = _pictures(path, stack, check=True)
        x = np.empty((len(pictures), _SIDE, _SIDE), np.uint8)

        def decode(k: int, data: bytes) -> None:
            name = f"{CLASSES[pictures[k][0]]}/{pictures[k][1]}"
            try:
                with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
                    if image.size != (_SIDE, _SIDE):
                        raise EquipoiseError(f"{path}: {name} is {image.size[0]} by {image.size[1]}, not 64 by 64")
                    x[k] = np.asarray(image.convert("L"))
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
                raise EquipoiseError(f"{path}: {name} is not a complete JPEG file; fetch the data again") from None

        # The archive is read by one thread; decoding releases the interpreter's lock and runs in several.
        with ThreadPoolExecutor(4) as pool:
            for first in range(0, len(pictures), 512):
                with archive_errors(path):
                    block = [(k, pictures[k][2]()) for k in range(first, min(first + 512, len(pictures)))]
                list(pool.map(lambda pair: decode(*pair), block))
                progress(first + len(block), len(pictures))
    return {"x": x, "y": np.array([label for label, _, _ in pictures], np.uint8)}
