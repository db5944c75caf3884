"""Tensors in files that are complete or absent."""

import json
import math
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from equipoise.errors import EquipoiseError, first_line
from equipoise.storage.atomic_files import atomic_write

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}
"""Number formats by their names in safetensors files."""
_METADATA = "__metadata__"
_MOST_AXES = 64


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors file says of its tensors, none of which is larger than the file."""

    metadata: dict[str, str]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    "shape and number format of each tensor"


def read_header(path: Path, what: str, limit: int = 1 << 20) -> TensorHeader:
    """Read the header of a safetensors file, and check it against the size of the file; no tensor is created.

    Args:
        path: the file.
        what: what it should hold, for error messages.
        limit: the largest number of bytes of the header.
    """
    try:
        return _read_header(path, limit)
    except OSError as error:
        raise EquipoiseError(f"{path} cannot be read as {what}: {error.strerror or first_line(error)}") from None
    except RecursionError:
        raise EquipoiseError(f"{path} cannot be read as {what}: its header is nested too deeply") from None
    except ValueError as error:  # also text that is not JSON, or not UTF-8
        raise EquipoiseError(f"{path} cannot be read as {what}: {first_line(error)}") from None


def _read_header(path: Path, limit: int) -> TensorHeader:
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, and a device has no end
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        size = path.stat().st_size - 8
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > size:
            raise ValueError("it is not a safetensors file, or it is cut off")
        if length > limit:
            raise ValueError(f"its header has {length} bytes, and at most {limit} are expected")
        header = json.loads(file.read(length).decode())
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata are not texts")
    tensors = {}
    for name, entry in header.items():
        shape, dtype, bytes_ = _described(name, entry)
        if (
            not 0 <= bytes_[0] <= bytes_[1] <= size - length
            or bytes_[1] - bytes_[0] != math.prod(shape) * dtype.itemsize
        ):
            raise ValueError(f"{name[:80]!r} of shape {str(list(shape))[:80]} does not fit into the file")
        tensors[name] = shape, dtype
    return TensorHeader(metadata, tensors)


def _described(name: str, entry: Any) -> tuple[tuple[int, ...], torch.dtype, tuple[int, int]]:
    """Return the shape, the number format and the place of a tensor."""
    if not isinstance(entry, dict):
        raise ValueError(f"{name[:80]!r} is not described")
    shape, place = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if shape is None or place is None or len(place) != 2:
        raise ValueError(f"{name[:80]!r} has no valid shape or place")
    dtype = DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise ValueError(
            f"{name[:80]!r} has the number format {str(entry.get('dtype'))[:20]!r}, which is not supported"
        )
    return shape, dtype, (place[0], place[1])


def _sizes(numbers: Any) -> tuple[int, ...] | None:
    """Return a list of sizes; None if it is not one."""
    if not isinstance(numbers, list) or len(numbers) > _MOST_AXES:
        return None
    return tuple(numbers) if all(type(n) is int and 0 <= n < 2**63 for n in numbers) else None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, atomically."""
    with atomic_write(path) as temporary:
        try:
            save_file({k: t.cpu().contiguous() for k, t in tensors.items()}, temporary, dict(metadata or {}))
            if metadata and len(metadata) > 1:
                _order_metadata(temporary, metadata)
        except OSError:
            raise
        except Exception as error:  # safetensors wraps errors of the disk in its own
            raise OSError(str(error)) from error


def _order_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Put the metadata of a file into the given order, because safetensors' differs from process to process."""
    with path.open("rb+") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        ordered = json.dumps({**header, _METADATA: dict(metadata)}, ensure_ascii=False, separators=(",", ":")).encode()
        if len(ordered) <= length:  # it is, unless a text is escaped in another way
            file.seek(8)
            file.write(ordered.ljust(length))


def write_rows(
    path: Path,
    tensors: Mapping[str, Tensor],
    tables: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    rows: Iterable[tuple[str, int, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file, atomically, of which some tensors come row by row and need not fit into memory.

    Args:
        path: the file.
        tensors: the tensors that are in memory.
        tables: shape and number format of each of the others.
        rows: the table, the row's number and the row, for every row of every table.
        metadata: texts that are stored with the tensors.
    """
    formats = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    places: dict[str, tuple[int, int]] = {}  # where each tensor begins, and the size of its rows in bytes
    end = 0
    for name, (shape, dtype) in {**{k: (tuple(t.shape), t.dtype) for k, t in tensors.items()}, **tables}.items():
        places[name] = end, math.prod(shape[1:]) * dtype.itemsize
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": formats[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        first = file.tell()
        file.truncate(first + end)
        whole = ((name, 0, tensor) for name, tensor in tensors.items())
        for part in (whole, rows):
            for name, row, tensor in part:
                begin, size = places[name]
                file.seek(first + begin + row * size)
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
