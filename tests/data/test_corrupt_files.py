"""Corrupted copies of every format: a sentence or sound data, never a traceback, a hang or half a cache."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.data.sources import SOURCES
from tests.support import datafiles
from tests.support.fuzzing import look_and_load
from tests.support.marks import slow_except
from tests.support.waiting import LIMIT

PACKED = [name for name, source in SOURCES.items() if not source.draws and not source.own]
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
