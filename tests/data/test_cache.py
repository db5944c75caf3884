"""What was decoded is kept, believed only when it is whole, and never in the way."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from equipoise.data.cache import Arrays, cached
from equipoise.errors import EquipoiseError

ARRAYS = {"x": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "y": np.array([1, 5]), "n": np.array(15)}


class Decoder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Arrays:
        self.calls += 1
        return {name: array.copy() for name, array in ARRAYS.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def same(arrays: Arrays) -> bool:
    return arrays.keys() == ARRAYS.keys() and all(
        np.array_equal(arrays[k], ARRAYS[k]) and arrays[k].dtype == ARRAYS[k].dtype for k in ARRAYS
    )


def test_decoded_once_and_again_when_the_file_changes(folder: Path, tmp_path: Path) -> None:
    file, decode = tmp_path / "file", Decoder()
    file.write_bytes(b"one")
    for _ in range(3):
        assert same(cached("name", [file], decode))
    assert decode.calls == 1
    file.write_bytes(b"other")
    cached("name", [file], decode)
    assert decode.calls == 2
    stat = file.stat()
    file.write_bytes(b"OTHER")  # same length, later
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    cached("name", [file], decode)
    assert decode.calls == 3
    assert [p.suffix for p in folder.iterdir()] == [".safetensors"]  # a changed file leaves no old entry behind


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_damaged_entry_is_decoded_anew(data: st.DataObject, folder: Path, tmp_path: Path) -> None:
    file, decode = tmp_path / "file", Decoder()
    file.write_bytes(b"one")
    cached("name", [file], decode)
    [entry] = folder.iterdir()
    content = bytearray(entry.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    entry.write_bytes(content)
    assert same(cached("name", [file], decode))
    assert same(cached("name", [file], decode))


def test_one_bit_in_the_numbers_is_noticed(folder: Path, tmp_path: Path) -> None:
    file, decode = tmp_path / "file", Decoder()
    file.write_bytes(b"one")
    cached("name", [file], decode)
    [entry] = folder.iterdir()
    content = bytearray(entry.read_bytes())
    content[-1] ^= 1  # the header comes first, the numbers last
    entry.write_bytes(content)
    assert same(cached("name", [file], decode))
    assert decode.calls == 2


def test_another_versions_entry_is_not_believed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, decode = tmp_path / "file", Decoder()
    file.write_bytes(b"one")
    cached("name", [file], decode)
    monkeypatch.setattr("equipoise.data.cache._FORMAT", "equipoise-decoded-next")
    cached("name", [file], decode)
    monkeypatch.setattr("equipoise.data.cache.version", lambda name: "next")
    cached("name", [file], decode)
    assert decode.calls == 3


def test_a_failed_decoding_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one")

    def fail() -> Arrays:
        raise EquipoiseError("no")

    with pytest.raises(EquipoiseError, match="no"):
        cached("name", [file], fail)
    assert not folder.exists()


def test_without_a_place_to_write_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, decode = tmp_path / "file", Decoder()
    file.write_bytes(b"one")
    for place in (str(file / "below-a-file"), "off"):
        monkeypatch.setenv("EQUIPOISE_CACHE", place)
        assert same(cached("name", [file], decode))
    assert decode.calls == 2
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    monkeypatch.delenv("EQUIPOISE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    assert same(cached("name", [file], decode))


def test_what_killed_processes_left_is_swept_away(folder: Path, tmp_path: Path) -> None:
    file, decode = tmp_path / "file", Decoder()
    file.write_bytes(b"one")
    cached("name", [file], decode)
    [entry] = folder.iterdir()
    for name, age in ((f"{entry.name}.123.part", 7200), (f"{entry.name}.124", 0)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age, time.time() - age))
    file.write_bytes(b"two")
    cached("name", [file], decode)
    assert sorted(p.name for p in folder.iterdir()) == [entry.name, f"{entry.name}.124"]


def test_an_entry_in_the_way_is_no_reason_to_stop(folder: Path, tmp_path: Path) -> None:
    file, decode = tmp_path / "file", Decoder()
    file.write_bytes(b"one")
    cached("name", [file], decode)
    [entry] = folder.iterdir()
    entry.unlink()
    entry.mkdir()
    assert same(cached("name", [file], decode))
    assert list(folder.iterdir()) == [entry]
    entry.rmdir()
    save_file({"x": torch.zeros(3, dtype=torch.bfloat16)}, entry, {"format": "equipoise-decoded-2"})
    assert same(cached("name", [file], decode))
