"""A web server on this machine that can behave as badly as servers do, and checks of what is fetched from it."""

import hashlib
import random
import re
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from equipoise.data.downloads import Remote, fetch
from equipoise.errors import EquipoiseError
from tests.support.commands import is_one_sentence

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


def said(remote: Remote, folder: Path, *words: str, **options: Any) -> str:
    """The one sentence with which it fails, which has these words in it."""
    with pytest.raises(EquipoiseError) as caught:
        fetch(remote, folder, **options)
    return is_one_sentence(caught.value, *words)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
