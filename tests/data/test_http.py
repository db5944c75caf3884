"""Addresses, redirections, and servers that answer oddly or not at all: one sentence, never a traceback."""

import errno
import os
import resource
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data import http
from equipoise.data.downloads import Remote, fetch
from equipoise.errors import EquipoiseError
from tests.support.publisher import CONTENT, Publisher, files_in, md5, said
from tests.support.waiting import LIMIT, until

pytestmark = pytest.mark.usefixtures("in_a_hurry")


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
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nbody", "not a number of bytes"),
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
    monkeypatch.setattr(http, "TIMEOUT", 0.1)
    publisher.hold = 1000
    said(remote, tmp_path, "nothing arrived for 0.1 seconds")
    until(lambda: len(publisher.asked) == 4)  # a busy server may not have heard of the last ones yet
    monkeypatch.setattr(http, "TIMEOUT", LIMIT)
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
    said(remote, tmp_path, remote.urls[0], "seems to be offline", f"at {tmp_path / 'set' / 'file.bin'} by hand")
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
    said(Remote("other/file.bin", remote.urls), tmp_path, "a folder of that name exists")
    if os.geteuid():  # nothing is forbidden to root
        (tmp_path / "other").chmod(0o500)
        said(Remote("other/new.bin", remote.urls), tmp_path, "cannot write", "Permission denied")
    assert publisher.asked == []


LINES = [
    *("Content-Length: 5", "Content-Length: 50", "Content-Length: x", "Content-Length: -1", "Content-Length:"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Content-Encoding: gzip", "Content-Encoding: br"),
    *("Content-Range: bytes 5-9/10", "Content-Range: bytes */10", "Content-Range: bytes 9-5/10", "Location: ///"),
    *('ETag: "a"', "ETag: \x80", 'ETag: "a\r\n b"', "Last-Modified: \x00", "Location: http://[", "Location: file:/x"),
]


@settings(max_examples=100)
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
