"""The cache of decoded data, which makes the second start quick: safetensors files, verified before they are used."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from equipoise.errors import EquipoiseError
from equipoise.storage import atomic_files, tensor_files

_FORMAT = "equipoise-decoded-3"
"""Raise this number when a reader decodes differently or checks more, so that older entries are no longer used."""
_ABANDONED = 3600  # seconds after which no process can still be writing a file

Arrays = dict[str, np.ndarray]


def cache_folder() -> Path | None:
    """Return $EQUIPOISE_CACHE or, if it is not set, the user's cache folder; None if the variable is "off"."""
    given = os.environ.get("EQUIPOISE_CACHE")
    if given == "off":
        return None
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "equipoise"
    except RuntimeError:  # a user without a home directory, as in some containers
        return None


def cached(name: str, paths: Sequence[Path], decode: Callable[[], Arrays]) -> Arrays:
    """Return what `decode` makes of these files, from the cache if they have not changed since.

    Args:
        name: the beginning of the cache entry's name.
        paths: the files that are decoded.
        decode: reads the files.
    """
    folder = cache_folder()
    if folder is None:
        return decode()
    resolved = [path.resolve() for path in paths]
    place = blake2b("\n".join(map(str, resolved)).encode(), digest_size=8).hexdigest()
    entry = folder / f"{name}-{place}.safetensors"
    known = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in resolved]
    stamp = json.dumps([version("equipoise"), known])
    if (arrays := _read(entry, stamp)) is not None:
        return arrays
    arrays = decode()
    _write(entry, stamp, arrays)
    return arrays


def _digest(arrays: Arrays) -> str:
    hasher = blake2b(digest_size=16)
    for name in sorted(arrays):
        hasher.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        hasher.update(np.ascontiguousarray(arrays[name]).data)
    return hasher.hexdigest()


def _read(entry: Path, stamp: str) -> Arrays | None:
    """Return the arrays of an entry; None unless it is exactly what was written for exactly these files."""
    try:
        with safe_open(entry, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT or metadata.get("files") != stamp:
                return None
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception:  # whatever is wrong with the entry, it is decoded again
        return None
    return arrays if metadata.get("digest") == _digest(arrays) else None


def _write(entry: Path, stamp: str, arrays: Arrays) -> None:
    """Write an entry under a temporary name of this process, then rename it.

    A cache that cannot be written is no reason to stop.
    """
    mine = entry.with_name(f"{entry.name}.{os.getpid()}")
    try:
        atomic_files.make_folder(entry.parent)
        tensors = {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()}
        tensor_files.write_tensors(mine, tensors, {"format": _FORMAT, "files": stamp, "digest": _digest(arrays)})
        mine.replace(entry)
    except (EquipoiseError, OSError):
        return
    finally:
        with suppress(OSError):
            mine.unlink(missing_ok=True)
            for left in entry.parent.glob(f"{entry.name}.*"):  # left by processes that were killed while writing
                if time.time() - left.stat().st_mtime > _ABANDONED:
                    left.unlink(missing_ok=True)
