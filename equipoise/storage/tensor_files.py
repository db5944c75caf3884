"""Tensors in files that are complete or absent."""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from equipoise.storage.atomic_files import atomic_write

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}
"""Number formats by their names in safetensors files."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, atomically."""
    with atomic_write(path) as temporary:
        try:
            save_file({k: t.cpu().contiguous() for k, t in tensors.items()}, temporary, dict(metadata or {}))
        except OSError:
            raise
        except Exception as error:  # safetensors wraps errors of the disk in its own
            raise OSError(str(error)) from error


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
