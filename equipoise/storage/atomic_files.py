"""Files that are whole or not there: written beside, flushed, and renamed into place."""

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
    """A temporary path that becomes `path` when the block ends well, and goes away when it does not."""
    if path.is_dir():
        raise EquipoiseError(f"cannot write {path}: it is a folder, and a file is wanted")
    temporary = path.with_name(path.name + ".part")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise EquipoiseError(
            f"cannot write {path}: {error.strerror or error}; what was saved before is whole"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EquipoiseError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise EquipoiseError(f"{path} is damaged ({error}); remove it, and what wrote it can write it again") from None


def digest(path: Path) -> str:
    with path.open("rb") as file:
        hasher = blake2b(digest_size=16)
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EquipoiseError(f"cannot create the folder {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise EquipoiseError(f"cannot write into the folder {path}; choose another with --out")
