"""Files that are complete or absent: written under a temporary name, flushed, and renamed into place."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` if the block succeeds, and removed if it fails."""
    if path.is_dir():
        raise EquipoiseError(f"cannot write {path}: it is a folder, not a file")
    if not path.parent.exists():
        raise EquipoiseError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    temporary = path.with_name(path.name + ".part")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise EquipoiseError(
            f"cannot write {path}: {error.strerror or error}; what was saved before is intact"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text to a file, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EquipoiseError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise EquipoiseError(f"{path} is damaged ({error}); remove it, and repeat the command that wrote it") from None


def digest(path: Path) -> str:
    """Return the digest of a file's content."""
    with path.open("rb") as file:
        hasher = blake2b(digest_size=16)
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def make_folder(path: Path) -> None:
    """Create a folder, unless it exists, and raise an error if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EquipoiseError(f"cannot create the folder {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise EquipoiseError(f"cannot write into the folder {path}; choose another with --out")
