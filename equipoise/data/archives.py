"""Readers of packed files: members are read into memory by name, up to a limit, and never unpacked onto the disk.

Files are read to their last byte, because gzip and xz have their checksums there: a damaged file is an error even if
all that is needed of it can be unpacked.
"""

import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from equipoise.errors import EquipoiseError, first_line

_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, struct.error)
_BLOCK = 1 << 16  # bytes that are read at once where the content does not matter
_END_OF_ZIP = b"PK\5\6"
_LARGEST_ZIP = 1 << 30  # bytes of all files of an archive together, unpacked


class _XzReader(io.RawIOBase):
    """The content of an .xz file; unlike `lzma.open`, it does not overlook what follows the last stream."""

    def __init__(self, path: Path):
        self.packed = path.open("rb")
        self.decoder: lzma.LZMADecompressor | None = self._decoder()

    @staticmethod
    def _decoder() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ)  # not the older format, which has no checksum

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.packed.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while self.decoder is not None:
            if self.decoder.eof:
                rest = self.decoder.unused_data.lstrip(b"\0")  # zeros may follow a stream
                while not rest and (more := self.packed.read(_BLOCK)):
                    rest = more.lstrip(b"\0")
                self.decoder = self._decoder() if rest else None
            else:
                rest = self.packed.read(_BLOCK) if self.decoder.needs_input else b""
                if self.decoder.needs_input and not rest:
                    raise EOFError("it ends within a stream")
            if self.decoder is not None and (data := self.decoder.decompress(rest, len(buffer))):
                buffer[: len(data)] = data
                return len(data)
        return 0


_OPENERS: dict[str, Callable[[Path], object]] = {
    ".gz": gzip.open,
    ".xz": lambda path: io.BufferedReader(_XzReader(path)),
}


class _Bounded:
    """A file for `tarfile` that neither reads nor skips more than it may."""

    def __init__(self, path: Path, file: BinaryIO, largest: int, whole: int):
        self.path, self.file, self.largest, self.whole = path, file, largest, whole

    def read(self, size: int) -> bytes:
        if size > self.largest:  # such as a name of a gigabyte
            raise EquipoiseError(
                f"{self.path}: a part of {size >> 20} MB cannot be right; remove it and fetch it again"
            )
        self._check(self.file.tell() + size)
        return self.file.read(size)

    def seek(self, position: int) -> int:
        self._check(position)
        return self.file.seek(position)

    def tell(self) -> int:
        return self.file.tell()

    def drain(self) -> None:
        """Read what follows the last member, so that the checksum is compared."""
        while self.read(_BLOCK):
            pass

    def _check(self, end: int) -> None:
        if end > self.whole + _BLOCK:
            raise EquipoiseError(f"{self.path} is larger than {self.whole >> 20} MB unpacked, which cannot be right")


@contextmanager
def archive_errors(path: Path) -> Iterator[None]:
    """Turn every error of reading a packed file into one sentence."""
    try:
        yield
    except PermissionError:
        raise EquipoiseError(f"{path} cannot be read: you have no permission to read it") from None
    except (*_BROKEN, ValueError) as error:  # zipfile raises ValueError for a broken directory
        text = f"{path} is damaged or cut off ({first_line(error)}); remove it and fetch it again"
        raise EquipoiseError(text) from None
    except (RuntimeError, NotImplementedError) as error:  # zipfile: encrypted, or an unknown compression
        raise EquipoiseError(f"{path} cannot be read: {first_line(error)}") from None


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


@contextmanager
def _opened_tar(path: Path, names: tuple[str, ...], limit: int) -> Iterator[tarfile.TarFile]:
    """Open a .tar.gz whose members of these names have at most `limit` bytes; all of it is read in the end."""
    with archive_errors(path), gzip.open(path) as file:
        bounded = _Bounded(path, cast(BinaryIO, file), limit + _BLOCK, (len(names) + 1) * limit)
        with tarfile.open(fileobj=cast(Any, bounded), mode="r:") as archive:
            yield archive
        bounded.drain()


def tar_members(path: Path, names: tuple[str, ...], limit: int) -> dict[str, bytes]:
    """Return the regular files with these base names in a .tar.gz; everything else in it is ignored.

    Args:
        path: the archive.
        names: the base names.
        limit: the largest number of bytes of a file; the whole archive may have one such file more.
    """
    found = {}
    with _opened_tar(path, names, limit) as archive:
        for member in archive:
            name = Path(member.name).name
            file = archive.extractfile(member) if member.isreg() and name in names else None
            if file is not None:
                found[name] = read_limited(path, name, cast(BinaryIO, file), limit)
    return found


def tar_sizes(path: Path, names: tuple[str, ...], limit: int) -> dict[str, int]:
    """Return the sizes in bytes of the regular files with these base names in a .tar.gz, which is read as a whole.

    Args:
        path: the archive.
        names: the base names.
        limit: the largest number of bytes of a file.
    """
    with _opened_tar(path, names, limit) as archive:
        return {Path(m.name).name: m.size for m in archive if m.isreg() and Path(m.name).name in names}


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open a zip archive, after which nothing may follow; the caller closes it."""
    with archive_errors(path):
        archive = zipfile.ZipFile(path)
        if not ends_with_zip(path, archive):
            archive.close()
            raise EquipoiseError(f"{path} is damaged: something follows the archive; remove it and fetch it again")
        return archive


def ends_with_zip(path: Path, archive: zipfile.ZipFile) -> bool:
    """Tell whether a file ends where its zip archive ends."""
    with path.open("rb") as file:
        file.seek(-22 - len(archive.comment), 2)  # the last record has 22 bytes and the comment
        return file.read(4) == _END_OF_ZIP


def check_zip(path: Path, archive: zipfile.ZipFile, without: set[str]) -> None:
    """Compare the files of an archive with their names and checksums, also those that nobody needs.

    A changed name in the directory of the archive would otherwise hide a file.

    Args:
        path: the archive, for error messages.
        archive: the open archive.
        without: names of files that are read anyway.
    """
    left = _LARGEST_ZIP
    for info in archive.infolist():
        left -= info.file_size
        if left < 0:
            raise EquipoiseError(f"{path} is larger than {_LARGEST_ZIP >> 20} MB unpacked, which cannot be right")
        if info.filename not in without:
            with archive_errors(path), archive.open(info) as file:
                while file.read(_BLOCK):
                    pass


def first_existing(folders: list[Path], names: list[str]) -> Path | None:
    """Return the first of these names that exists in the first folder that has any of them, or None."""
    for folder in folders:
        with archive_errors(folder):
            for name in names:
                if (folder / name).is_file():
                    return folder / name
    return None
