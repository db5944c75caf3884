"""Downloads from a server on this machine that can behave as badly as servers do."""

import errno
import fcntl
import hashlib
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data import download, web
from equipoise.data.download import Remote, fetch
from equipoise.errors import EquipoiseError

CONTENT = random.Random(0).randbytes(300_001)
OTHER = random.Random(1).randbytes(len(CONTENT))
DAY, NEXT_DAY = "Mon, 05 Jan 2026 10:00:00 GMT", "Tue, 06 Jan 2026 10:00:00 GMT"


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


class Publisher(ThreadingHTTPServer):
    """A web server whose manners the test chooses, and that remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        self.gate = threading.Event()
        super().__init__(("127.0.0.1", 0), Answer)
        self.reset()

    def reset(self) -> None:
        self.gate.set()  # lets go whoever an earlier test held
        self.gate = threading.Event()
        self.content = CONTENT
        self.headers = {"ETag": '"first"'}
        self.ranges = True  # whether it sends the rest when asked for it
        self.knows_if_range = True
        self.sizes = "length"  # how it says where the body ends: length, chunked or close
        self.breaks: list[int] = []  # the next answers end after so many bytes of their body
        self.reset_connection = False  # whether they end rudely
        self.hold: int | None = None  # waits for the gate after so many bytes of the body
        self.statuses: list[int] = []  # of the next answers, instead of an answer with a body
        self.raw: list[bytes] | None = None  # sent as they are in turn, the last one again and again
        self.redirects: dict[str, str] = {}
        self.paths: list[str] = []
        self.asked: list[dict[str, str]] = []  # the headers of the requests
        self.served = 0  # bytes of bodies

    def url(self, name: str = "file.bin") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"

    def ranges_asked(self) -> list[str | None]:
        return [headers.get("Range") for headers in self.asked]

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that has gone away is part of the tests


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Publisher

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.paths.append(self.path)
        server.asked.append(dict(self.headers))
        self.close_connection = True
        if server.raw is not None:
            self.wfile.write(server.raw.pop(0) if len(server.raw) > 1 else server.raw[0])
        elif self.path in server.redirects:
            self.empty(302, Location=server.redirects[self.path])
        elif server.statuses:
            self.empty(server.statuses.pop(0))
        elif self.path.startswith("/missing/"):
            self.empty(404)
        else:
            self.send_file()

    def empty(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_file(self) -> None:
        server, start = self.server, 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        same = self.headers.get("If-Range") in server.headers.values() or not server.knows_if_range
        if wanted and server.ranges and same:
            start = int(wanted[1])
            if start >= len(server.content):
                return self.empty(416)
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        for name, value in server.headers.items():
            self.send_header(name, value)
        if server.sizes == "length":
            self.send_header("Content-Length", str(len(body)))
        elif server.sizes == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        end = server.breaks.pop(0) if server.breaks else None
        hold, gate = server.hold, server.gate
        if hold is not None:
            self.send_body(body[:hold])
            gate.wait()
        self.send_body(body[hold or 0 : end])
        if server.sizes == "chunked" and end is None:
            self.wfile.write(b"0\r\n\r\n")
        if end is not None and server.reset_connection:  # no farewell: the other side sees a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def send_body(self, body: bytes) -> None:
        self.server.served += len(body)
        if self.server.sizes != "chunked":
            self.wfile.write(body)
            return
        for i in range(0, len(body), 10_000):
            chunk = body[i : i + 10_000]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


@pytest.fixture(scope="module", autouse=True)
def in_a_hurry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "PAUSE", 0)
        patch.setattr(web, "TIMEOUT", 20.0)
        patch.setenv("no_proxy", "127.0.0.1")
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Publisher]:
    publisher = Publisher()
    thread = threading.Thread(target=publisher.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield publisher
    publisher.gate.set()
    publisher.shutdown()
    thread.join()
    publisher.server_close()


@pytest.fixture
def publisher(server: Publisher) -> Iterator[Publisher]:
    server.reset()
    yield server
    server.gate.set()


@pytest.fixture
def remote(publisher: Publisher) -> Remote:
    return Remote("set/file.bin", (publisher.url(),), md5(CONTENT))


def said(remote: Remote, folder: Path, *words: str, **options: Any) -> str:
    """The one sentence with which it fails, which has these words in it."""
    with pytest.raises(EquipoiseError) as caught:
        fetch(remote, folder, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence
    return sentence


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
    said(remote, tmp_path, remote.urls[0], "only 200000 of 300001 bytes came", "again")
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
    said(remote, folder, "only 80000 of 300001 bytes came")
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
        "import sys; from pathlib import Path; from equipoise.data.download import Remote, fetch; "
        "fetch(Remote(sys.argv[1], (sys.argv[2],)), Path(sys.argv[3]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, remote.name, remote.urls[0], str(tmp_path)])
    try:
        part = tmp_path / f"{remote.name}.part"
        until(lambda: part.exists() and part.stat().st_size == 70_000)
        assert not (tmp_path / remote.name).exists()
        said(remote, tmp_path, "another process is fetching", remote.name)
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


@pytest.mark.parametrize("status", [404, 403, 500, 503, 204, 206, 416, 999])
def test_the_next_address_is_asked(status: int, publisher: Publisher, tmp_path: Path) -> None:
    publisher.statuses = [status]
    remote = Remote("file.bin", (publisher.url("one"), publisher.url("two")), md5(CONTENT))
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.paths == ["/one", "/two"]
    (tmp_path / "file.bin").unlink()
    publisher.statuses = [500, status]
    said(remote, tmp_path, publisher.url("two"), str(status), str(tmp_path / "file.bin"))
    assert files_in(tmp_path) == []


def test_the_next_address_may_have_the_right_file(publisher: Publisher, tmp_path: Path) -> None:
    publisher.redirects = {"/wrong": publisher.url("right"), "/right": publisher.url("file.bin")}
    publisher.breaks = [10, 20, 30, 40]
    remote = Remote("file.bin", (publisher.url("broken"), publisher.url("wrong")), md5(CONTENT))
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.paths == [*["/broken"] * 4, "/wrong", "/right", "/file.bin"]


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_mirror_is_asked_instead(slash: str, publisher: Publisher, tmp_path: Path) -> None:
    urls = ("http://publisher.invalid/deep/down/one.gz?raw=1", "http://other.invalid/one.gz", "ftp://host.invalid/two")
    publisher.statuses = [404, 404]
    path = fetch(Remote("set/file.gz", urls), tmp_path, mirror=publisher.url("copies") + slash)
    assert path.read_bytes() == CONTENT
    assert publisher.paths == ["/copies/file.gz", "/copies/one.gz", "/copies/two"]


def test_a_redirection_is_followed_and_resumed(publisher: Publisher, tmp_path: Path) -> None:
    publisher.redirects = {"/old": "/new"}
    publisher.breaks = [90_000]
    assert fetch(Remote("file.bin", (publisher.url("old"),)), tmp_path).read_bytes() == CONTENT
    assert publisher.paths == ["/old", "/new"] * 2
    assert publisher.ranges_asked() == [None, None, "bytes=90000-", "bytes=90000-"]


@pytest.mark.parametrize("kind", ["file", "ftp", "data", "gopher"])
def test_only_the_web_is_fetched_from(
    kind: str, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{kind}_proxy", publisher.url())  # urllib would take this as a way to go there
    (tmp_path / "secret").write_text("not to be copied")
    place = {"file": f"file://{tmp_path}/secret", "data": "data:,hello"}.get(kind, f"{kind}://127.0.0.1/secret")
    said(Remote("file.bin", (place,)), tmp_path, place, "http and https")
    assert publisher.asked == []
    said(Remote("file.bin", ("http://publisher.invalid/secret",)), tmp_path, kind, mirror=place)
    publisher.redirects = {"/file.bin": place}
    said(Remote("file.bin", (publisher.url(),)), tmp_path, publisher.url(), "redirects", "http or https")
    assert len(publisher.asked) == 1
    assert files_in(tmp_path) == ["secret"]


@pytest.mark.parametrize("to", ["/file.bin", "http://127.0.0.1:{n}/", "http://[::1", "http://", "http://127.0.0.1:x/"])
def test_redirections_that_lead_nowhere(to: str, publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    publisher.redirects = {"/file.bin": to.format(n=10**30)}
    said(remote, tmp_path, remote.urls[0])
    assert len(publisher.asked) < 30
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file.bin",
        "http://",
        "http:///x",
        "http://[",
        "http://a b/",
        "http://127.0.0.1:99999/",
        f"http://127.0.0.1:{10**30}/",
    ],
)
def test_addresses_that_are_none(url: str, tmp_path: Path) -> None:
    said(Remote("file.bin", (url,)), tmp_path, url)
    assert files_in(tmp_path) == []


def test_no_address_at_all(tmp_path: Path) -> None:
    said(Remote("set/file.bin", ()), tmp_path, str(tmp_path / "set" / "file.bin"))


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (b"", "broke 4 times"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "broke 4 times"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer in HTTP"),
        (b"\xff\x00" * 40_000, "status line"),
        (b"HTTP/1.1 two hundred\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "100 headers"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", "only 5 of 10 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nbody", "'-3'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n0123456789", "'1_0'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nbody", "no length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", "broke 4 times"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\nabc", "broke 4 times"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nbody", "packed as 'gzip'"),
        (b"HTTP/1.1 302 Found\r\n\r\n", "redirects"),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", "redirects"),
    ],
)
def test_odd_answers_get_one_sentence(
    reply: bytes, word: str, publisher: Publisher, remote: Remote, tmp_path: Path
) -> None:
    publisher.raw = [reply]
    said(Remote(remote.name, remote.urls), tmp_path, remote.urls[0], word)
    assert not (tmp_path / remote.name).exists()


def test_a_packed_file_that_the_server_calls_encoded_comes_as_it_is(publisher: Publisher, tmp_path: Path) -> None:
    publisher.headers = {"Content-Encoding": "x-gzip"}
    assert fetch(Remote("a.gz", (publisher.url("a.gz"),), md5(CONTENT)), tmp_path).read_bytes() == CONTENT


def test_more_than_was_announced_is_not_taken(publisher: Publisher, tmp_path: Path) -> None:
    publisher.raw = [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody and more"]
    remote = Remote("file.bin", (publisher.url(),))
    assert fetch(remote, tmp_path).read_bytes() == b"body"
    (tmp_path / "file.bin").unlink()
    interrupted_reply = b'HTTP/1.1 200 OK\r\nContent-Length: 4\r\nETag: "a"\r\n\r\nbo'
    publisher.raw = [interrupted_reply, b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 2-3/4\r\n\r\ndy and more"]
    assert fetch(remote, tmp_path).read_bytes() == b"body"


def test_chunks_count_more_than_the_length(publisher: Publisher, tmp_path: Path) -> None:
    publisher.headers = {"Content-Length": "7"}
    publisher.sizes = "chunked"
    assert fetch(Remote("file.bin", (publisher.url(),)), tmp_path).read_bytes() == CONTENT


def test_a_server_that_falls_silent(
    publisher: Publisher, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "TIMEOUT", 0.1)
    publisher.hold = 1000
    said(remote, tmp_path, "nothing came for 0.1 seconds")
    assert len(publisher.asked) == 4
    monkeypatch.setattr(web, "TIMEOUT", 20.0)
    publisher.hold = None
    assert fetch(remote, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "?"), OSError(errno.ENETUNREACH, "?")])
def test_offline(error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def unreachable(*arguments: Any, **options: Any) -> None:
        tries.append(arguments)
        raise error

    monkeypatch.setattr(socket, "create_connection", unreachable)
    remote = Remote("set/file.bin", ("http://publisher.invalid/file.bin",))
    said(remote, tmp_path, remote.urls[0], "seems to be offline", f"by hand at {tmp_path / 'set' / 'file.bin'}")
    assert len(tries) == 1


def test_a_network_that_goes_and_comes_back(
    publisher: Publisher, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.breaks = [100_000]
    connect, tries = socket.create_connection, []

    def now_and_then(*arguments: Any, **options: Any) -> socket.socket:
        tries.append(arguments)
        if len(tries) == 2:
            raise socket.gaierror(socket.EAI_AGAIN, "?")
        return connect(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", now_and_then)
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.served == len(CONTENT)


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/file.bin"
        said(Remote("file.bin", (url,)), tmp_path, url, "refused")


def test_a_full_disk_keeps_what_has_come(publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        said(remote, tmp_path, f"cannot write {tmp_path / remote.name}", "too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert publisher.ranges_asked() == [None, "bytes=150000-"]


def test_folders_that_cannot_be_written(publisher: Publisher, remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "set").write_text("a file where a folder should be")
    said(remote, tmp_path, "cannot write")
    (tmp_path / "other" / "file.bin").mkdir(parents=True)
    said(Remote("other/file.bin", remote.urls), tmp_path, "is a folder")
    if os.geteuid():  # nothing is forbidden to root
        (tmp_path / "other").chmod(0o500)
        said(Remote("other/new.bin", remote.urls), tmp_path, "cannot write", "Permission denied")
    assert publisher.asked == []


@settings(max_examples=40, deadline=None)
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


LINES = [
    *("Content-Length: 5", "Content-Length: 50", "Content-Length: x", "Content-Length: -1", "Content-Length:"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Content-Encoding: gzip", "Content-Encoding: br"),
    *("Content-Range: bytes 5-9/10", "Content-Range: bytes */10", "Content-Range: bytes 9-5/10", "Location: ///"),
    *('ETag: "a"', "ETag: \x80", 'ETag: "a\r\n b"', "Last-Modified: \x00", "Location: http://[", "Location: file:/x"),
]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.builds(
            lambda status, lines, body: "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1") + body,
            st.sampled_from(
                ["200 OK", "206 Partial", "416 No", "302 Found", "100 Continue", "200", "20 ?", "301 \xff"]
            ),
            st.lists(st.sampled_from(LINES), max_size=4, unique=True),
            st.one_of(st.sampled_from([b"5\r\nhello\r\n0\r\n\r\n", b"-5\r\nhello", b"hello"]), st.binary(max_size=20)),
        )
        | st.binary(max_size=30),
        min_size=1,
        max_size=5,
    )
)
def test_no_answer_whatever_ends_in_a_traceback(server: Publisher, replies: list[bytes]) -> None:
    server.reset()
    server.raw = list(replies)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            sentence = ""
            try:
                fetch(Remote("file.bin", (server.url(),)), Path(folder))
            except EquipoiseError as error:
                sentence = str(error)
            assert "\n" not in sentence
            assert (Path(folder) / "file.bin").exists() == (sentence == "")
