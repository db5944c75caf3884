"""MNIST and Fashion-MNIST, in the IDX files in which they are published."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from equipoise.data.pool import Pool
from equipoise.errors import EquipoiseError

_TYPES = {0x08: ">u1", 0x0C: ">i4"}


def find(folders: list[Path], name: str, where_to_get: str) -> Path:
    """The file, packed or not, in the first folder that has it."""
    for folder in folders:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.exists():
                return path
    looked = " and ".join(str(folder) for folder in folders)
    raise EquipoiseError(
        f"the file {name}.gz was not found in {looked}; {where_to_get}, and name the folder with --data"
    )


def read_idx(path: Path) -> np.ndarray:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise EquipoiseError(f"{path} cannot be read: {error}; fetch it again") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise EquipoiseError(
            f"{path} is not an IDX file: it begins with {content[:4].hex()}, not with 0000080x or 00000c0x"
        )
    axes = content[3]
    header = 4 + 4 * axes
    if len(content) < header:
        raise EquipoiseError(f"{path} is cut off in its header; fetch it again")
    shape = struct.unpack(f">{axes}I", content[4:header])
    kind = np.dtype(_TYPES[content[2]])
    expected = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if len(content) - header != expected:
        raise EquipoiseError(
            f"{path} holds {len(content) - header} bytes of data where its header says {expected}; fetch it again"
        )
    return np.frombuffer(content, dtype=kind, offset=header).reshape(shape)


def images(raw: np.ndarray) -> torch.Tensor:
    """Grey images as (sample, 1, height, width) between 0 and 1."""
    return torch.from_numpy(raw.astype(np.float32) / 255).unsqueeze(1)


def load(folder: str, data: Path, where_to_get: str) -> Pool:
    """Training and test part of a data set in MNIST's four files, pooled."""
    xs, ys = [], []
    for part in ("train", "t10k"):
        x = read_idx(find([data / folder, data], f"{part}-images-idx3-ubyte", where_to_get))
        path = find([data / folder, data], f"{part}-labels-idx1-ubyte", where_to_get)
        y = read_idx(path)
        if len(x) != len(y):
            raise EquipoiseError(f"{path} has {len(y)} labels for {len(x)} images; the files do not belong together")
        if y.size and y.max() > 9:
            raise EquipoiseError(f"{path} has the label {y.max()}; labels are 0 to 9")
        xs.append(x)
        ys.append(y)
    return Pool(images(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys).astype(np.int64)), classes=10)
