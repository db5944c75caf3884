"""Clients' data in files: arrays x and y in safetensors or npz, one file or one folder per client."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from equipoise.data.federation import SPLITS
from equipoise.errors import EquipoiseError

# What numpy, zipfile and safetensors raise for damaged files.
_DAMAGED: tuple[type[Exception], ...] = (OSError, ValueError, TypeError, EOFError, NotImplementedError, RuntimeError)
_DAMAGED += (SafetensorError, zipfile.BadZipFile, zlib.error)
_SUFFIXES = (".safetensors", ".npz")
_NAMES = "x and y, or train.x and train.y, and optionally validation.x, validation.y, test.x and test.y"


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a file, or of all files of a folder; x in train.npz is returned as train.x."""
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES)
        if not found:
            raise EquipoiseError(f"{path} has no data: put a .safetensors or .npz file there, with {_NAMES}")
        arrays: dict[str, Tensor] = {}
        for file in found:
            prefix = f"{file.stem}." if file.stem in SPLITS else ""
            for name, array in _read_file(file).items():
                if prefix + name in arrays:
                    raise EquipoiseError(f"{path} has {prefix + name} twice; keep one of its files")
                arrays[prefix + name] = array
        return arrays
    if path.suffix not in _SUFFIXES:
        raise EquipoiseError(f"{path} is not a folder, nor a .safetensors or .npz file")
    return _read_file(path)


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with np.load(path, allow_pickle=False) as arrays:  # never pickle: it could run code
            return {name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in arrays.files}
    except FileNotFoundError:
        raise EquipoiseError(f"there is no file {path}") from None
    except _DAMAGED as error:
        raise EquipoiseError(f"{path} cannot be read as arrays: {error}") from None


def _parts(arrays: dict[str, Tensor], path: Path) -> Any:
    """Return the arrays in the form that `from_clients` takes."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for prefix in ("", *SPLITS):
        x, y = (f"{prefix}.{k}" if prefix else k for k in ("x", "y"))
        if (x in arrays) != (y in arrays):
            raise EquipoiseError(f"{path} has only one of {x} and {y}; both are needed")
        if x in arrays:
            pairs[prefix] = arrays.pop(x), arrays.pop(y)
    if arrays:
        raise EquipoiseError(f"{path} has {', '.join(sorted(arrays))}; the arrays must be {_NAMES}")
    if "" in pairs and len(pairs) > 1:
        raise EquipoiseError(f"{path} has both undivided samples and divided ones; the arrays must be {_NAMES}")
    if "" not in pairs and "train" not in pairs:
        raise EquipoiseError(f"{path} has no training samples; the arrays must be {_NAMES}")
    return pairs.get("", pairs)


def read_client(path: Path) -> Any:
    """Return the samples of the client in a file or a folder, in the form that `from_clients` takes."""
    return _parts(read_arrays(path), path)


def read_clients(path: Path) -> dict[str, Any]:
    """Return the samples of several clients by name, in the form that `from_clients` takes.

    Args:
        path: the file of one client, or a folder with one file (or one folder of train, validation and test files) per
            client. A client is named after its file or folder.
    """
    if not path.exists():
        raise EquipoiseError(f"there is no file or folder {path}")
    if not path.is_dir():
        return {path.stem: read_client(path)}
    found = sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES or (p.is_dir() and p.name[0] != "."))
    if not found:
        raise EquipoiseError(f"{path} has no data: put one .safetensors or .npz file per client there, with {_NAMES}")
    if all(p.stem in SPLITS for p in found):
        return {path.resolve().name: read_client(path)}
    clients: dict[str, Any] = {}
    for each in found:
        if (name := each.name if each.is_dir() else each.stem) in clients:
            raise EquipoiseError(f"{path} has two clients named {name!r}; keep one of the files")
        clients[name] = read_client(each)
    return clients
