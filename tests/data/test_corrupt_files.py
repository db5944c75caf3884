"""Corrupted copies of every format: a sentence or sound data, never a traceback, a hang or half a cache."""

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from equipoise.data.cache import _digest
from equipoise.data.federation import from_shares
from equipoise.data.partitions.iid import IID
from equipoise.data.partitions.natural import Natural
from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest
from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from equipoise.randomness import generator
from tests.support import datafiles
from tests.support.marks import slow_except
from tests.support.waiting import LIMIT

PACKED = [name for name, source in SOURCES.items() if not source.draws and name != "folder"]  # the user's own files
OTHER = ["shakespeare", "electricity", "electricity zipped", "medical-mnist"]
CASES = [*((name, datafiles.everything) for name in PACKED), *((name, datafiles.other_layouts) for name in OTHER)]

Whole = dict[object, tuple[Path, dict[str, list[Path]]]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    made: Whole = {}
    for make in (datafiles.everything, datafiles.other_layouts):
        folder = tmp_path_factory.mktemp("whole")
        made[make] = folder, make(folder)
    return made


def corrupt(data: bytes, draw: st.DrawFn) -> bytes:
    content = bytearray(data)
    kind = draw(st.sampled_from(["cut", "flip", "zero", "insert", "double", "empty"]))
    # Headers and the directories at the end of archives deserve more than their share.
    ends = st.one_of(
        st.integers(0, min(64, len(content)) - 1), st.integers(max(0, len(content) - 256), len(content) - 1)
    )
    place = st.one_of(st.integers(0, len(content) - 1), ends)
    at = draw(place)
    if kind == "cut":
        content = content[:at]
    elif kind == "flip":
        for _ in range(draw(st.integers(1, 8))):
            content[draw(place)] ^= draw(st.integers(1, 255))
    elif kind == "zero":
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif kind == "insert":
        content[at:at] = draw(st.binary(min_size=1, max_size=32))
    elif kind == "double":
        content = content + content
    else:
        content = bytearray()
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "layout"),
    slow_except(CASES, CASES[1], several=True),
    ids=[f"{make.__name__}-{name}" for name, make in CASES],
)
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_corrupted_file_brings_a_sentence_or_sound_data(
    name: str, layout: object, whole: Whole, data: st.DataObject, tmp_path: Path
) -> None:
    folder, files = whole[layout]
    work, cache = tmp_path / "work", tmp_path / "cache"
    for path in (work, cache):
        shutil.rmtree(path, ignore_errors=True)
    victim = data.draw(st.sampled_from(files[name]))
    for file in files[name]:
        copy = work / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        content = file.read_bytes()
        copy.write_bytes(data.draw(st.composite(lambda d, c=content: corrupt(c, d))()) if file == victim else content)
    before = os.environ["EQUIPOISE_CACHE"]
    os.environ["EQUIPOISE_CACHE"] = str(cache)
    signal.alarm(int(LIMIT))  # a hang is a failure; the real thing takes milliseconds
    try:
        look_and_load(name.split()[0], work, cache)
    finally:
        signal.alarm(0)
        os.environ["EQUIPOISE_CACHE"] = before


def look_and_load(name: str, work: Path, cache: Path) -> None:
    source = SOURCES[name](**({"extent": "full"} if name == "digits-by-writer" else {}))
    with suppress(EquipoiseError):
        source.look(work)
    try:
        pool = source.load(LoadRequest(work))
    except EquipoiseError as error:
        said = str(error)
    else:
        check_sound(pool)
        again = source.load(LoadRequest(work))  # from the cache
        assert torch.equal(again.x, pool.x)
        assert torch.equal(again.y, pool.y)
        return
    assert "\n" not in said
    # A file that decodes may still be useless (no window fits); but nothing is cached that did not decode whole.
    for entry in cache.glob("*"):
        with safe_open(entry, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            assert file.metadata()["digest"] == _digest(arrays)


def check_sound(pool: Pool) -> None:
    partition, clients = (Natural(), None) if pool.owner is not None else (IID(), 1)
    shares = partition(pool, clients, generator(0, "partition"))
    from_shares(pool.x, pool.y, shares, (0.7, 0.1, 0.2), 0, pool.classes, pool.part).fingerprint(splits=True)
    assert len(pool.x) == len(pool.y) > 0
    assert not pool.x.is_floating_point() or bool(torch.isfinite(pool.x).all())
    if pool.classes is not None:
        assert int(pool.y.min()) >= 0
        assert int(pool.y.max()) < pool.classes
