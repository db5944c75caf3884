"""Downloads: whole and exact, or not there; what a break leaves is gone on from."""

import fcntl
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data.downloads import Remote, fetch
from equipoise.errors import EquipoiseError
from tests.support.publisher import (
    CONTENT,
    DAY,
    NEXT_DAY,
    OTHER,
    Publisher,
    files_in,
    md5,
    said,
)
from tests.support.waiting import LIMIT, until

pytestmark = pytest.mark.usefixtures("in_a_hurry")


@pytest.mark.parametrize("sizes", ["length", "chunked", "close"])
@pytest.mark.parametrize("checksum", [md5(CONTENT), md5(CONTENT).upper(), None])
def test_the_exact_bytes_arrive_and_nothing_else(
    sizes: str, checksum: str | None, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.sizes = sizes
    steps: list[tuple[int, int | None]] = []
    remote = Remote("a/b/file.bin", (publisher.url(),), checksum)
    path = fetch(remote, tmp_path, progress=lambda done, total: steps.append((done, total)))
    assert path == tmp_path / "a" / "b" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert files_in(tmp_path) == ["a/b/file.bin"]
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert (steps[0][0], steps[-1][0]) == (0, len(CONTENT))
    assert {total for _, total in steps} == {len(CONTENT) if sizes == "length" else None}
    [asked] = publisher.asked
    assert re.fullmatch(r"equipoise/\d+\.\d+.*", asked["User-Agent"])
    assert asked["Accept-Encoding"] == "identity"


def test_an_empty_file_is_a_file(publisher: Publisher, tmp_path: Path) -> None:
    publisher.content = b""
    assert fetch(Remote("empty", (publisher.url(),), md5(b"")), tmp_path).read_bytes() == b""
    assert files_in(tmp_path) == ["empty"]


@pytest.mark.parametrize("content", [CONTENT, b"a small part that somebody put there"])
def test_what_is_there_is_left_alone_without_a_request(
    content: bytes, publisher: Publisher, remote: Remote, tmp_path: Path
) -> None:
    target = tmp_path / remote.name
    target.parent.mkdir()
    target.write_bytes(content)
    assert fetch(remote, tmp_path) == target
    assert target.read_bytes() == content
    assert publisher.asked == []


@pytest.mark.parametrize("headers", [{"ETag": '"first"'}, {"ETag": 'W/"weak"', "Last-Modified": DAY}])
@pytest.mark.parametrize("sizes", ["length", "chunked"])
def test_after_a_break_only_the_rest_is_asked_for(
    sizes: str, headers: dict[str, str], publisher: Publisher, remote: Remote, tmp_path: Path
) -> None:
    publisher.sizes, publisher.headers = sizes, headers
    publisher.breaks = [100_000, 1, 0]
    steps: list[int] = []
    assert fetch(remote, tmp_path, progress=lambda done, _: steps.append(done)).read_bytes() == CONTENT
    assert publisher.ranges_asked() == [None, "bytes=100000-", "bytes=100001-", "bytes=100001-"]
    assert {asked.get("If-Range") for asked in publisher.asked[1:]} == {list(headers.values())[-1]}
    assert publisher.served == len(CONTENT)
    assert steps == sorted(steps)
    assert steps[-1] == len(CONTENT)
    assert files_in(tmp_path) == [remote.name]


def test_the_next_call_goes_on_where_this_one_gave_up(publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    publisher.breaks = [50_000] * 4
    said(remote, tmp_path, remote.urls[0], "only 200000 of 300001 bytes arrived", "again")
    assert not (tmp_path / remote.name).exists()
    assert (tmp_path / f"{remote.name}.part").read_bytes() == CONTENT[:200_000]
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == [None, *(f"bytes={n}-" for n in (50_000, 100_000, 150_000, 200_000))]
    assert publisher.served == len(CONTENT)
    assert files_in(tmp_path) == [remote.name]


def test_ctrl_c_keeps_what_has_come(publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    def stop(done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(remote, tmp_path, progress=stop)
    come = (tmp_path / f"{remote.name}.part").stat().st_size
    assert 0 < come < len(CONTENT)
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == [None, f"bytes={come}-"]


def interrupted(publisher: Publisher, remote: Remote, folder: Path) -> None:
    """The first 80,000 bytes have come, and four requests were made."""
    publisher.breaks = [80_000, 0, 0, 0]
    said(remote, folder, "only 80000 of 300001 bytes arrived")
    assert (folder / f"{remote.name}.part").stat().st_size == 80_000
    publisher.asked.clear()
    publisher.paths.clear()
    publisher.served = 0


@pytest.mark.parametrize("knows_if_range", [True, False])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ETag": '"first"'}, {"ETag": '"second"'}),
        ({"Last-Modified": DAY}, {"Last-Modified": NEXT_DAY}),
        ({"ETag": '"first"'}, {"ETag": 'W/"first"', "Last-Modified": DAY}),
    ],
)
def test_a_file_that_changed_is_fetched_afresh(
    before: dict[str, str], after: dict[str, str], knows_if_range: bool, publisher: Publisher, tmp_path: Path
) -> None:
    remote = Remote("file.bin", (publisher.url(),))  # no checksum that would find two halves
    publisher.headers = before
    interrupted(publisher, remote, tmp_path)
    publisher.content, publisher.headers, publisher.knows_if_range = OTHER, after, knows_if_range
    assert fetch(remote, tmp_path).read_bytes() == OTHER
    assert publisher.ranges_asked() == ["bytes=80000-"] + [None] * (not knows_if_range)


def test_without_a_validator_it_starts_afresh(publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    publisher.headers = {"ETag": 'W/"weak"'}
    publisher.breaks = [80_000, 90_000]
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == [None, None, None]


@pytest.mark.parametrize("memory", [b"", b"\xff", b"[1]", b"{}", b'{"url": "URL"}', b'{"url": "elsewhere"}', None])
def test_a_spoilt_memory_starts_afresh(
    memory: bytes | None, publisher: Publisher, remote: Remote, tmp_path: Path
) -> None:
    interrupted(publisher, remote, tmp_path)
    sidecar = tmp_path / f"{remote.name}.part.json"
    assert json.loads(sidecar.read_text()) == {"url": remote.urls[0], "validator": '"first"'}
    if memory is None:
        sidecar.unlink()
    else:
        sidecar.write_bytes(memory.replace(b"URL", remote.urls[0].encode()))
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == [None]
    assert files_in(tmp_path) == [remote.name]


def test_another_address_starts_afresh_but_only_if_it_has_the_file(publisher: Publisher, tmp_path: Path) -> None:
    remote = Remote("file.bin", (publisher.url("missing/file.bin"), publisher.url("there/file.bin")), md5(CONTENT))
    interrupted(publisher, remote, tmp_path)
    said(Remote("file.bin", remote.urls[:1]), tmp_path, "404")
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == [None, None, "bytes=80000-"]
    (tmp_path / "file.bin").unlink()
    interrupted(publisher, remote, tmp_path)
    assert fetch(Remote("file.bin", (publisher.url("third"),)), tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == [None]


def test_a_server_without_ranges_will_do(publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    publisher.ranges = False
    publisher.breaks = [100_000, 200_000]
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.served == len(CONTENT) + 300_000


def test_a_part_that_is_too_long_is_dropped(publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    interrupted(publisher, remote, tmp_path)
    with (tmp_path / f"{remote.name}.part").open("ab") as file:
        file.write(CONTENT)
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == [f"bytes={80_000 + len(CONTENT)}-", None]


@pytest.mark.parametrize(
    "span",
    [
        "bytes 0-300000/300001",
        "bytes 80000-80009/300001",
        "bytes 80000-300000/*",
        "bytes 80000-300000",
        "?",
        "",
        "bytes 80000-300000/300001\r\nContent-Length: 5",
    ],
)
def test_the_wrong_rest_is_not_taken(span: str, publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    interrupted(publisher, remote, tmp_path)
    wrong = f'HTTP/1.1 206 Partial Content\r\nContent-Range: {span}\r\nETag: "first"\r\n\r\n'.encode() + OTHER
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(CONTENT), CONTENT)
    publisher.raw = [wrong, whole]
    assert fetch(Remote(remote.name, remote.urls), tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == ["bytes=80000-", None]


def test_a_wrong_checksum_leaves_nothing(publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    publisher.content = OTHER
    said(remote, tmp_path, remote.urls[0], md5(OTHER), md5(CONTENT))
    assert len(publisher.asked) == 1
    assert files_in(tmp_path) == []


def test_halves_that_do_not_match_are_fetched_once_more(publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    interrupted(publisher, remote, tmp_path)
    (tmp_path / f"{remote.name}.part").write_bytes(OTHER[:80_000])
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == ["bytes=80000-", None]
    (tmp_path / remote.name).unlink()
    interrupted(publisher, remote, tmp_path)
    publisher.content = OTHER
    said(remote, tmp_path, md5(OTHER))
    assert publisher.ranges_asked() == ["bytes=80000-", None]
    assert files_in(tmp_path) == []


def test_a_wrong_file_in_pieces_is_not_fetched_for_ever(publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    publisher.content, publisher.breaks = OTHER, [100_000, 300_000] * 20
    said(remote, tmp_path, md5(OTHER))
    assert publisher.ranges_asked() == [None, "bytes=100000-"] * 2
    assert files_in(tmp_path) == []


def test_the_final_name_never_holds_half_a_file_even_after_a_kill(
    publisher: Publisher, remote: Remote, tmp_path: Path
) -> None:
    publisher.hold = 70_000
    code = (
        "import sys; from pathlib import Path; from equipoise.data import http; "
        "from equipoise.data.downloads import Remote, fetch; "
        f"http.TIMEOUT = {LIMIT}; fetch(Remote(sys.argv[1], (sys.argv[2],)), Path(sys.argv[3]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, remote.name, remote.urls[0], str(tmp_path)])
    try:
        part = tmp_path / f"{remote.name}.part"
        until(lambda: part.exists() and part.stat().st_size == 70_000)
        assert not (tmp_path / remote.name).exists()
        said(remote, tmp_path, "another process is downloading", remote.name)
        assert part.read_bytes() == CONTENT[:70_000]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    publisher.hold = None
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == [None, "bytes=70000-"]
    assert files_in(tmp_path) == [remote.name]


@pytest.mark.parametrize("finished", [True, False])
def test_another_process_that_ends_while_we_open_the_part(
    finished: bool, publisher: Publisher, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we have opened is then the finished file, or one without a name; we must write to neither."""
    target, part, lock, calls = tmp_path / remote.name, tmp_path / f"{remote.name}.part", fcntl.flock, []

    def late(file: Any, how: int) -> None:
        calls.append(how)
        if len(calls) == 1 and finished:
            part.write_bytes(b"theirs")
            part.replace(target)
        elif len(calls) == 1:
            part.unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert fetch(remote, tmp_path).read_bytes() == (b"theirs" if finished else CONTENT)
    assert len(publisher.asked) == (not finished)
    assert files_in(tmp_path) == [remote.name]


@pytest.mark.slow
@settings(max_examples=40)
@given(
    breaks=st.lists(st.integers(0, 37_500), max_size=8),  # together less than the file
    sizes=st.sampled_from(["length", "chunked"]),
    ranges=st.booleans(),
    rude=st.booleans(),
    headers=st.sampled_from([{}, {"ETag": '"tag"'}, {"Last-Modified": DAY}]),
    checksum=st.booleans(),
)
def test_wherever_it_breaks_the_file_is_exact(
    breaks: list[int], sizes: str, ranges: bool, rude: bool, headers: dict[str, str], checksum: bool, server: Publisher
) -> None:
    server.reset()
    server.breaks, server.sizes, server.ranges = list(breaks), sizes, ranges
    server.reset_connection, server.headers = rude, headers
    remote = Remote("file.bin", (server.url(),), md5(CONTENT) if checksum else None)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "file.bin"
        for _ in range(1 + len(breaks) // 4):
            assert not target.exists()
            try:
                fetch(remote, Path(folder))
            except EquipoiseError:
                continue
        assert target.read_bytes() == CONTENT
        assert files_in(Path(folder)) == ["file.bin"]
    if ranges and headers and not rude:  # a reset may throw away what was on its way
        assert server.served == len(CONTENT)
