"""Tensors in files that are complete or absent."""

from collections.abc import Mapping
from pathlib import Path

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
            save_file({k: t.contiguous() for k, t in tensors.items()}, temporary, dict(metadata or {}))
        except OSError:
            raise
        except Exception as error:  # safetensors wraps errors of the disk in its own
            raise OSError(str(error)) from error
