"""Archives are read to their last byte: one changed bit, a missing byte or a byte too many is an error."""

import gzip
import io
import json
import lzma
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from equipoise.data import archives
from equipoise.data.client_files import read_arrays
from equipoise.data.source import LoadRequest
from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from tests.support import datafiles

FLIPS = 100
MEMBERS = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")


def flat(path: Path) -> None:
    """CIFAR-10 with pixels that compress well."""
    with tarfile.open(path, "w:gz") as archive:
        for k, name in enumerate(MEMBERS):
            records = np.zeros((40, 3073), np.uint8)
            records[:, 0], records[:, 1:] = np.arange(40) % 10, np.arange(3072) // 97 + k
            info = tarfile.TarInfo(f"cifar/{name}")
            info.size = records.size
            archive.addfile(info, io.BytesIO(records.tobytes()))


def roles(path: Path) -> None:
    datafiles.roles(path)


def table(path: Path) -> None:
    datafiles.electricity(path)


def deflated(path: Path) -> None:
    datafiles.uci(path, quarters=200, zipped=True)


def pictures(path: Path) -> None:
    datafiles.medical(path)


def idx(path: Path) -> None:
    datafiles.mnist(path.parent / "made", packed=True)
    for file in (path.parent / "made").iterdir():
        (path.parent / file.name).write_bytes(file.read_bytes())


SETS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "cifar, random pixels": ("cifar10", "cifar-10-binary.tar.gz", datafiles.cifar),
    "cifar, flat pixels": ("cifar10", "cifar-10-binary.tar.gz", flat),
    "idx": ("mnist", "train-images-idx3-ubyte.gz", idx),
    "xz": ("shakespeare", "shakespeare-roles.json.xz", roles),
    "gzip of a table": ("electricity", "electricity.csv.gz", table),
    "zip of a table": ("electricity", "electricity.zip", deflated),
    "zip of pictures": ("medical-mnist", "medical-mnist.zip", pictures),
}


@pytest.fixture(params=SETS)
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    source, name, make = SETS[request.param]
    make(tmp_path / name)
    return source, tmp_path / name


def refused(source: str, path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        SOURCES[source]().load(LoadRequest(path.parent))
    except EquipoiseError as error:
        return "\n" not in str(error)
    return False


def stream(path: Path, data: bytes) -> list[int]:
    """The bytes of a file that a checksum covers: without the descriptions before and after them."""
    if path.suffix == ".xz":
        return list(range(len(data)))
    if path.suffix == ".gz":
        return list(range(40, len(data) - 10))  # the name of the file is at the beginning
    found: list[int] = []
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            at = info.header_offset
            begin = at + 30 + sum(struct.unpack("<2H", data[at + 26 : at + 30]))
            found += range(begin, begin + info.compress_size - 1)
    return found


def test_a_flipped_bit_is_an_error(packed: tuple[str, Path]) -> None:
    source, path = packed
    data, rng = path.read_bytes(), random.Random(0)
    assert not refused(source, path, data)
    places = stream(path, data)
    for _ in range(FLIPS):
        changed = bytearray(data)
        at = rng.choice(places)
        changed[at] ^= 1 << rng.randrange(8)
        assert refused(source, path, bytes(changed)), at


def test_missing_and_additional_bytes_are_errors(packed: tuple[str, Path]) -> None:
    source, path = packed
    data = path.read_bytes()
    for missing in range(1, 12):
        assert refused(source, path, data[:-missing]), missing
    for more in (b"x", b"garbage" * 20, data[:100]):
        assert refused(source, path, data + more), more
    assert not refused(source, path, data)


def test_a_changed_name_in_the_directory_of_an_archive_hides_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "medical-mnist.zip"
    datafiles.medical(path)
    data = path.read_bytes()
    at = data.rindex(b"000001.jpeg")
    assert refused("medical-mnist", path, data[:at] + b"000001.jpfg" + data[at + 11 :])


def test_the_status_of_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    datafiles.cifar(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(EquipoiseError, match="damaged or cut off"):
        SOURCES["cifar10"]().look(tmp_path)


def test_a_file_of_arrays_is_read_to_its_end(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.npz", random.Random(0)
    np.savez_compressed(path, x=np.arange(1200.0).reshape(300, 4), y=np.arange(300) % 3)
    data = path.read_bytes()
    places = stream(path, data)
    for changed in (data[:-1], data + b"x"):
        path.write_bytes(changed)
        with pytest.raises(EquipoiseError, match="cannot be read as arrays"):
            read_arrays(path)
    for _ in range(FLIPS):
        flipped = bytearray(data)
        flipped[rng.choice(places)] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(EquipoiseError, match="cannot be read as arrays"):
            read_arrays(path)


def test_a_shape_that_is_smaller_than_the_array_is_an_error(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((30, 4)))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", buffer.getvalue().replace(b"(30, 4)", b"(10, 4)"))
    with pytest.raises(EquipoiseError, match="'x' is longer than its header says"):
        read_arrays(tmp_path / "a.npz")


def test_several_streams_and_zeros_between_them_are_read(tmp_path: Path) -> None:
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(b"one ") + bytes(8) + lzma.compress(b"two") + bytes(70_000))
    assert archives.content(path, 100) == b"one two"
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    assert archives.content(path, 100) == b"one two"


def bomb(path: Path, name: str, kind: bytes, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_bomb_is_refused_before_it_is_unpacked(kind: bytes, tmp_path: Path) -> None:
    bomb(tmp_path / "a.tar.gz", "other", kind, 8 << 20)
    with pytest.raises(EquipoiseError, match="cannot be right"):
        archives.tar_members(tmp_path / "a.tar.gz", ("data",), 1 << 20)


def test_what_follows_the_last_member_is_bounded_too(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("data")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    with gzip.open(tmp_path / "a.tar.gz", "wb") as file:
        file.write(buffer.getvalue() + bytes(8 << 20))
    with pytest.raises(EquipoiseError, match="larger than 2 MB unpacked, which cannot be right"):
        archives.tar_members(tmp_path / "a.tar.gz", ("data",), 1 << 20)


def test_blank_space_after_a_packed_table_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "electricity.csv.gz"
    datafiles.electricity(path)
    data = gzip.compress(gzip.decompress(path.read_bytes()) + b"\n" * 200_000)
    assert not refused("electricity", path, data)
    assert refused("electricity", path, data[:-8] + bytes(8))
    path.unlink()
    path = tmp_path / "shakespeare-roles.json.xz"
    path.write_bytes(lzma.compress(json.dumps({"a": "word " * 200}).encode()) + b"more")
    with pytest.raises(EquipoiseError, match="damaged or cut off"):
        SOURCES["shakespeare"]().load(LoadRequest(tmp_path))
