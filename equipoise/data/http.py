"""Asking a server for a file: whatever it does, an answer or one of three errors."""

import errno
import http.client
import re
import socket
import ssl
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import version
from pathlib import Path
from typing import IO, cast
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from equipoise.errors import EquipoiseError

TIMEOUT = 30.0  # seconds without a sign of life, in connecting and in reading
BLOCK = 1 << 16

_SCHEMES = ("http", "https")
_NO_NETWORK = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
# what the standard library raises for what a server or an address may do; OverflowError: a port above 65535
_TROUBLE = (OSError, http.client.HTTPException, ValueError, OverflowError)


class RequestRefused(EquipoiseError):
    """This address does not give the file; another one may."""

    def __init__(self, url: str, why: str, advice: str = "try again later, or name another mirror") -> None:
        super().__init__(f"cannot fetch {url}: {why}; {advice}")


class Offline(RequestRefused):
    """Not even the host could be reached."""


class BrokenTransfer(Exception):
    """The connection ended before the file did; asking for the rest may help."""


def total_of_rest(response: http.client.HTTPResponse, start: int, validator: str) -> int | None:
    """The length of the whole file, if this is the rest of it and of no other; else None."""
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return None
    span = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", response.headers.get("Content-Range", ""))
    if span is None or (int(span[1]), int(span[2])) != (start, int(span[3]) - 1):
        return None
    total = int(span[3])
    if response.headers.get("Content-Length", str(total - start)) != str(total - start):
        return None
    if validator_of(response.headers) not in (None, validator):  # a server that does not know If-Range
        return None
    return total


def validator_of(headers: Message) -> str | None:
    """What the server calls this very content: a strong ETag, or when it was last changed."""
    tag, changed = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if re.fullmatch(r'"[\x21\x23-\x7e]*"', tag):
        return tag
    return changed if re.fullmatch(r"[\x20-\x7e]+", changed) else None


def length_of_whole(url: str, response: http.client.HTTPResponse, target: Path) -> int | None:
    """How much will come, None if the server does not say; an error if it will not be the file as it is."""
    if response.status != http.HTTPStatus.OK:
        phrase = http.client.responses.get(response.status, "which is no status that HTTP knows")
        raise RequestRefused(url, f"the server answers {response.status} ({phrase})", by_hand(target))
    coding = response.headers.get("Content-Encoding", "").strip().lower()
    # many servers call a file that is packed on their disk "encoded", and send it as it is: that is what we want
    stored_packed = coding in ("gzip", "x-gzip") and urlsplit(url).path.endswith((".gz", ".tgz"))
    if coding not in ("", "identity") and not stored_packed:
        raise RequestRefused(url, f"the server sends it packed as {coding[:40]!r}, though it was asked not to")
    given = response.headers.get("Content-Length")
    if given is None or response.chunked:  # chunks say themselves where they end
        return None
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise RequestRefused(url, f"the server says that the file is {given[:40]!r} bytes long, which is no length")
    return int(given)


def blocks(response: http.client.HTTPResponse, left: int | None) -> Iterator[bytes]:
    while left is None or left > 0:
        try:
            block = response.read1(BLOCK if left is None else min(BLOCK, left))
        except _TROUBLE as error:
            raise BrokenTransfer(_reason(error)) from None
        if not block:
            return
        if left is not None:
            left -= len(block)
        yield block


def ask(url: str, target: Path, headers: dict[str, str]) -> http.client.HTTPResponse:
    own = {"User-Agent": f"equipoise/{version('equipoise')}", "Accept-Encoding": "identity"}
    try:
        if urlsplit(url).scheme not in _SCHEMES:
            raise RequestRefused(url, "only addresses with http and https are fetched", "name such an address")
        answer = _opener().open(request.Request(url, headers=own | headers), timeout=TIMEOUT)
        return cast(http.client.HTTPResponse, answer)
    except HTTPError as error:  # other answers than redirections come back as they are
        error.close()
        why = "the server redirects in a circle, or to an address that is none with http or https"
        raise RequestRefused(url, why, by_hand(target)) from None
    except _TROUBLE as error:
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, socket.gaierror) or (isinstance(cause, OSError) and cause.errno in _NO_NETWORK):
            why = f"its host cannot be reached ({_reason(cause)}), so this machine seems to be offline"
            raise Offline(url, why, f"go online, or put the file by hand at {target}") from None
        lasting = isinstance(cause, (ConnectionRefusedError, ssl.SSLCertVerificationError))
        if isinstance(cause, OSError) and not lasting:
            raise BrokenTransfer(_reason(cause)) from None
        raise RequestRefused(url, _reason(cause), by_hand(target)) from None


def by_hand(target: Path) -> str:
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
