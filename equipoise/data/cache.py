"""Decoded data are kept, so that the second start is quick: safetensors files, checked before they are believed."""

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

_FORMAT = "equipoise-decoded-2"
"""To be raised when a reader decodes differently or checks more: what an older one let pass must not be believed."""
_ABANDONED = 3600  # seconds after which nobody is writing a file any more

Arrays = dict[str, np.ndarray]


def cache_folder() -> Path | None:
    """$EQUIPOISE_CACHE, else the user's own cache folder; None where the variable says "off"."""
    given = os.environ.get("EQUIPOISE_CACHE")
    if given == "off":
        return None
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "equipoise"
    except RuntimeError:  # a user without a home, as in some containers
        return None


def cached(name: str, paths: Sequence[Path], decode: Callable[[], Arrays]) -> Arrays:
    """What `decode` makes of these files, from the cache where they have not changed since."""
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
    """None for whatever is not exactly what was written for exactly these files."""
    try:
        with safe_open(entry, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT or metadata.get("files") != stamp:
                return None
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception:  # whatever it is, it is not what was written here
        return None
    return arrays if metadata.get("digest") == _digest(arrays) else None


def _write(entry: Path, stamp: str, arrays: Arrays) -> None:
    """A cache that cannot be written is no reason to stop; the name is this process's own until it is whole."""
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
            for left in entry.parent.glob(f"{entry.name}.*"):  # by processes that were killed while they wrote
                if time.time() - left.stat().st_mtime > _ABANDONED:
                    left.unlink(missing_ok=True)
