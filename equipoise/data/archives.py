"""Readers of packed files: members are read into memory by name, up to a limit, and never unpacked onto the disk."""

import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from equipoise.errors import EquipoiseError

_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, struct.error)
_OPENERS: dict[str, Callable[[Path], object]] = {".gz": gzip.open, ".xz": lzma.open}


@contextmanager
def archive_errors(path: Path) -> Iterator[None]:
    """Turn every error of reading a packed file into one sentence."""
    try:
        yield
    except PermissionError:
        raise EquipoiseError(f"{path} cannot be read: you have no permission to read it") from None
    except (*_BROKEN, ValueError) as error:  # zipfile raises ValueError for a broken directory
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise EquipoiseError(f"{path} is damaged or cut off ({reason}); remove it and fetch it again") from None
    except (RuntimeError, NotImplementedError) as error:  # zipfile: encrypted, or an unknown compression
        raise EquipoiseError(f"{path} cannot be read: {error}") from None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; if its name ends with .gz or .xz, it is unpacked on the way."""
    with archive_errors(path), cast(BinaryIO, _OPENERS.get(path.suffix, lambda p: p.open("rb"))(path)) as file:
        yield file


def content(path: Path, limit: int) -> bytes:
    """Return the content of a file; more than `limit` bytes are an error (a zip bomb)."""
    with opened(path) as file:
        return read_limited(path, path.name, file, limit)


def read_limited(path: Path, name: str, file: BinaryIO, limit: int) -> bytes:
    """Read a file to its end; more than `limit` bytes are an error.

    Args:
        path: the archive, for the error message.
        name: the name of the file in the archive, for the error message.
        file: the open file.
        limit: the largest number of bytes.
    """
    data = file.read(limit + 1)
    if len(data) > limit:
        raise EquipoiseError(f"{path}: {name} is larger than {limit >> 20} MB unpacked, which cannot be right")
    return data


def tar_members(path: Path, names: tuple[str, ...], limit: int) -> dict[str, bytes]:
    """Return the regular files with these base names in a .tar.gz; everything else in it is ignored."""
    found = {}
    with archive_errors(path), tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = Path(member.name).name
            file = archive.extractfile(member) if member.isreg() and name in names else None
            if file is not None:
                found[name] = read_limited(path, name, cast(BinaryIO, file), limit)
    return found


def tar_sizes(path: Path, names: tuple[str, ...]) -> dict[str, int]:
    """Return the sizes in bytes of the regular files with these base names in a .tar.gz."""
    with archive_errors(path), tarfile.open(path, "r:gz") as archive:
        return {Path(m.name).name: m.size for m in archive if m.isreg() and Path(m.name).name in names}


def first_existing(folders: list[Path], names: list[str]) -> Path | None:
    """Return the first of these names that exists in the first folder that has any of them, or None."""
    for folder in folders:
        with archive_errors(folder):
            for name in names:
                if (folder / name).is_file():
                    return folder / name
    return None
