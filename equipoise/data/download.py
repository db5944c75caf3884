"""Files fetched from their publishers: whole and checked, or not there; what a break leaves is gone on from."""

import errno
import fcntl
import http.client
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from hashlib import file_digest, md5
from importlib.metadata import version
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import IO, cast
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from equipoise.errors import EquipoiseError
from equipoise.files import write_json

TIMEOUT = 30.0  # seconds without a sign of life, in connecting and in reading
RETRIES = 3  # after a broken connection
PAUSE = 1.0  # seconds before the first retry, doubled before each further one
BLOCK = 1 << 16

_SCHEMES = ("http", "https")
_NO_NETWORK = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
# what the standard library raises for what a server or an address may do; OverflowError: a port above 65535
_TROUBLE = (OSError, http.client.HTTPException, ValueError, OverflowError)

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Remote:
    """A file that its publisher offers."""

    name: str
    "path below the data folder, such as mnist/train-images-idx3-ubyte.gz"
    urls: tuple[str, ...]
    "tried in this order"
    md5: str | None = None
    "what the publisher says; None: none is published, and the reader checks the counts"


class _Refused(EquipoiseError):
    """This address does not give the file; another one may."""

    def __init__(self, url: str, why: str, advice: str = "try again later, or name another mirror") -> None:
        super().__init__(f"cannot fetch {url}: {why}; {advice}")


class _Offline(_Refused):
    """Not even the host could be reached."""


class _Broken(Exception):
    """The connection ended before the file did; asking for the rest may help."""


def _silent(done: int, total: int | None) -> None:
    pass


def fetch(remote: Remote, folder: Path, *, mirror: str | None = None, progress: Progress = _silent) -> Path:
    """The file below `folder`, fetched if it is not there yet.

    A file that is there is returned as it is, without a look at its checksum or at the network: it may be a copy packed
    anew, or a part that somebody put there on purpose. Remove it to fetch it again.

    mirror: a folder on the web that holds files of the same names, asked instead of the publisher.
    progress: called with the bytes that are here and the bytes in all, None if the server does not say; the former only
    falls when the file must be fetched afresh.
    """
    target = folder / remote.name
    with _writing(target):
        if target.is_dir():
            raise EquipoiseError(f"cannot fetch {target}: it is a folder, and a file is wanted; move it away")
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
    with _claimed(target) as part:
        if target.exists():  # another process has just finished it
            return target
        failure = EquipoiseError(f"no address is known for {remote.name}; put the file by hand at {target}")
        for url in _addresses(remote, mirror):
            try:
                _fetch_checked(url, part, remote.md5, progress)
            except _Refused as error:
                failure = error
            else:
                part.finish()
                return target
        raise failure


def _addresses(remote: Remote, mirror: str | None) -> tuple[str, ...]:
    if mirror is None:
        return remote.urls
    names = (PurePosixPath(url.partition("?")[0]).name for url in remote.urls)
    return tuple(dict.fromkeys(f"{mirror.rstrip('/')}/{name}" for name in names))


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EquipoiseError(
            f"cannot write {target}: {error.strerror or error}; make room or name another folder with --data"
        ) from None


class _Part:
    """What has come so far, and beside it what tells whether the server still has the same file."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(target.name + ".part")
        self.sidecar = target.with_name(target.name + ".part.json")
        self.resumed = False
        # unbuffered: what has come is in the file at once, however this process ends, and closing cannot fail
        self.file: FileIO = self.path.open("ab+", buffering=0)

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def is_in_place(self) -> bool:
        """Not so if another process has renamed or removed the file between our opening and our locking it."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def validator(self, url: str) -> str | None:
        """What to ask for the rest with; None: only the whole file will do."""
        if not self.size:
            return None
        try:
            known = json.loads(self.sidecar.read_text(encoding="utf-8"))
            return str(known["validator"]) if known["url"] == url else None
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def clear(self) -> None:
        with _writing(self.target):
            self.file.truncate(0)
            self.sidecar.unlink(missing_ok=True)
        self.resumed = False

    def restart(self, url: str, validator: str | None) -> None:
        self.clear()  # first, so that old bytes never stand beside a new validator
        if validator is not None:
            write_json(self.sidecar, {"url": url, "validator": validator})

    def append(self, block: bytes) -> None:
        rest = memoryview(block)
        with _writing(self.target):
            while rest:
                rest = rest[self.file.write(rest) :]

    def md5(self) -> str:
        with _writing(self.target):
            self.file.seek(0)
            return file_digest(self.file, lambda: md5(usedforsecurity=False)).hexdigest()

    def finish(self) -> None:
        with _writing(self.target):
            os.fsync(self.file.fileno())
            self.path.replace(self.target)
            self.sidecar.unlink(missing_ok=True)


@contextmanager
def _claimed(target: Path) -> Iterator[_Part]:
    """The part, for this process alone; the lock goes with the process, however it ends."""
    while True:
        with _writing(target):
            part = _Part(target)
        with part.file:
            with _writing(target):
                try:
                    fcntl.flock(part.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise EquipoiseError(f"another process is fetching {target}; wait until it has finished") from None
            if not part.is_in_place():
                continue
            try:
                yield part
            finally:
                if not part.size:  # nothing to go on from
                    with suppress(OSError):
                        part.sidecar.unlink(missing_ok=True)
                        part.path.unlink(missing_ok=True)
            return


def _fetch_checked(url: str, part: _Part, expected: str | None, progress: Progress) -> None:
    """Fill the part with what the address holds, and compare it with the checksum."""
    for last in (False, True):
        _fetch_whole(url, part, progress)
        if expected is None or (found := part.md5()) == expected.lower():
            return
        resumed = part.resumed
        part.clear()
        if last or not resumed:  # else two halves may not have belonged together, and all of one piece may do
            raise _Refused(url, f"what came has the md5 checksum {found}, the publisher says {expected}")


def _fetch_whole(url: str, part: _Part, progress: Progress) -> None:
    for attempt in range(RETRIES + 1):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            return _transfer(url, part, progress)
        except _Offline:
            if attempt in (0, RETRIES):  # in between, the network was there a moment ago and may come back
                raise
        except _Broken as error:
            failure = f"the connection broke {RETRIES + 1} times, at last because {error}"
    raise _Refused(url, failure, "ask again later: it goes on from what has come, if the server lets it")


def _transfer(url: str, part: _Part, progress: Progress) -> None:
    response, total = _begin(url, part)
    with response:
        progress(part.size, total)
        for block in _blocks(response, None if total is None else total - part.size):
            part.append(block)
            progress(part.size, total)
    if total is not None and part.size != total:
        raise _Broken(f"only {part.size} of {total} bytes came")
    if total is None and not part.size:  # as after a break in the headers, which the standard library overlooks
        raise _Broken("nothing came")


def _begin(url: str, part: _Part) -> tuple[http.client.HTTPResponse, int | None]:
    """An answer whose body belongs at the end of the part, and how long the part will then be."""
    validator = part.validator(url)
    if validator is not None:
        response = _ask(url, part.target, {"Range": f"bytes={part.size}-", "If-Range": validator})
        total = _total_of_rest(response, part.size, validator)
        if total is not None:
            part.resumed = True
            return response, total
        if response.status in (http.HTTPStatus.PARTIAL_CONTENT, http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
            response.close()
            part.clear()
            response = _ask(url, part.target, {})
    else:
        response = _ask(url, part.target, {})
    try:
        length = _length_of_whole(url, response, part.target)
        part.restart(url, _validator(response.headers))
    except BaseException:
        response.close()
        raise
    return response, length


def _total_of_rest(response: http.client.HTTPResponse, start: int, validator: str) -> int | None:
    """The length of the whole file, if this is the rest of it and of no other; else None."""
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return None
    span = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", response.headers.get("Content-Range", ""))
    if span is None or (int(span[1]), int(span[2])) != (start, int(span[3]) - 1):
        return None
    total = int(span[3])
    if response.headers.get("Content-Length", str(total - start)) != str(total - start):
        return None
    if _validator(response.headers) not in (None, validator):  # a server that does not know If-Range
        return None
    return total


def _validator(headers: Message) -> str | None:
    """What the server calls this very content: a strong ETag, or when it was last changed."""
    tag, changed = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if re.fullmatch(r'"[\x21\x23-\x7e]*"', tag):
        return tag
    return changed if re.fullmatch(r"[\x20-\x7e]+", changed) else None


def _length_of_whole(url: str, response: http.client.HTTPResponse, target: Path) -> int | None:
    """How much will come, None if the server does not say; an error if it will not be the file as it is."""
    if response.status != http.HTTPStatus.OK:
        phrase = http.client.responses.get(response.status, "which is no status that HTTP knows")
        raise _Refused(url, f"the server answers {response.status} ({phrase})", _by_hand(target))
    coding = response.headers.get("Content-Encoding", "").strip().lower()
    # many servers call a file that is packed on their disk "encoded", and send it as it is: that is what we want
    stored_packed = coding in ("gzip", "x-gzip") and urlsplit(url).path.endswith((".gz", ".tgz"))
    if coding not in ("", "identity") and not stored_packed:
        raise _Refused(url, f"the server sends it packed as {coding[:40]!r}, though it was asked not to")
    given = response.headers.get("Content-Length")
    if given is None or response.chunked:  # chunks say themselves where they end
        return None
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise _Refused(url, f"the server says that the file is {given[:40]!r} bytes long, which is no length")
    return int(given)


def _blocks(response: http.client.HTTPResponse, left: int | None) -> Iterator[bytes]:
    while left is None or left > 0:
        try:
            block = response.read1(BLOCK if left is None else min(BLOCK, left))
        except _TROUBLE as error:
            raise _Broken(_reason(error)) from None
        if not block:
            return
        if left is not None:
            left -= len(block)
        yield block


def _ask(url: str, target: Path, headers: dict[str, str]) -> http.client.HTTPResponse:
    own = {"User-Agent": f"equipoise/{version('equipoise')}", "Accept-Encoding": "identity"}
    try:
        if urlsplit(url).scheme not in _SCHEMES:
            raise _Refused(url, "only addresses with http and https are fetched", "name such an address")
        answer = _opener().open(request.Request(url, headers=own | headers), timeout=TIMEOUT)
        return cast(http.client.HTTPResponse, answer)
    except HTTPError as error:  # other answers than redirections come back as they are
        error.close()
        why = "the server redirects in a circle, or to an address that is none with http or https"
        raise _Refused(url, why, _by_hand(target)) from None
    except _TROUBLE as error:
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, socket.gaierror) or (isinstance(cause, OSError) and cause.errno in _NO_NETWORK):
            why = f"its host cannot be reached ({_reason(cause)}), so this machine seems to be offline"
            raise _Offline(url, why, f"go online, or put the file by hand at {target}") from None
        lasting = isinstance(cause, (ConnectionRefusedError, ssl.SSLCertVerificationError))
        if isinstance(cause, OSError) and not lasting:
            raise _Broken(_reason(cause)) from None
        raise _Refused(url, _reason(cause), _by_hand(target)) from None


def _by_hand(target: Path) -> str:
    return f"name another mirror, or put the file by hand at {target}"


def _reason(error: BaseException | str) -> str:
    """In a few words on one line, whatever the server has put into it."""
    if isinstance(error, TimeoutError):
        return f"nothing came for {TIMEOUT:g} seconds"
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
        return "the server does not answer in HTTP"
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(told.split())[:200] or type(error).__name__


class _Redirections(request.HTTPRedirectHandler):
    def redirect_request(
        self, req: request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> request.Request | None:
        if urlsplit(newurl).scheme not in _SCHEMES:  # the usual one follows to FTP
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Answers(request.HTTPErrorProcessor):
    """Every answer is an answer; only redirections are for others to follow."""

    def http_response(self, request: request.Request, response: http.client.HTTPResponse) -> http.client.HTTPResponse:
        if 300 <= response.status < 400:
            return cast(http.client.HTTPResponse, super().http_response(request, response))
        return response

    https_response = http_response


def _opener() -> request.OpenerDirector:
    """Like the usual one, without the handlers that open files of this machine, FTP and data addresses."""
    opener = request.OpenerDirector()
    for handler in (
        *(request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.UnknownHandler),
        *(request.HTTPDefaultErrorHandler, _Redirections, _Answers),
    ):
        opener.add_handler(handler())
    return opener
