"""HTTP requests for files: whatever a server does, the result is a response or one of three errors."""

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

TIMEOUT = 30.0  # seconds without any data, while connecting and while reading
BLOCK = 1 << 16

_SCHEMES = ("http", "https")
_NO_NETWORK = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
# what the standard library raises for bad servers and addresses; OverflowError: a port above 65535
_NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError, OverflowError)


class RequestRefused(EquipoiseError):
    """An address does not provide the file; another one may."""

    def __init__(self, url: str, why: str, advice: str = "try again later, or choose another mirror") -> None:
        super().__init__(f"cannot fetch {url}: {why}; {advice}")


class Offline(RequestRefused):
    """The host cannot be reached."""


class BrokenTransfer(Exception):
    """The connection ended before the file was complete; requesting the rest may help."""


def total_of_rest(response: http.client.HTTPResponse, start: int, validator: str) -> int | None:
    """Return the length of the whole file if the response is the requested rest of the same file, else None.

    Args:
        response: the response to a request for the rest.
        start: the number of bytes that are there already.
        validator: what identified the content of these bytes.
    """
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return None
    span = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", response.headers.get("Content-Range", ""))
    if span is None or (int(span[1]), int(span[2])) != (start, int(span[3]) - 1):
        return None
    total = int(span[3])
    if response.headers.get("Content-Length", str(total - start)) != str(total - start):
        return None
    if validator_of(response.headers) not in (None, validator):  # the server does not support If-Range
        return None
    return total


def validator_of(headers: Message) -> str | None:
    """Return what identifies this exact content for the server: a strong ETag, or the time of the last change."""
    tag, changed = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if re.fullmatch(r'"[\x21\x23-\x7e]*"', tag):
        return tag
    return changed if re.fullmatch(r"[\x20-\x7e]+", changed) else None


def length_of_whole(url: str, response: http.client.HTTPResponse, target: Path) -> int | None:
    """Return the length of the body, or None if it is unknown; raise an error if it is not the file as stored.

    Args:
        url: the address, for error messages.
        response: the response to a request for the whole file.
        target: where the file belongs, for error messages.
    """
    if response.status != http.HTTPStatus.OK:
        phrase = http.client.responses.get(response.status, "which is not a known HTTP status")
        raise RequestRefused(url, f"the server answers {response.status} ({phrase})", by_hand(target))
    coding = response.headers.get("Content-Encoding", "").strip().lower()
    # many servers call a file that is stored packed "encoded", and send it as it is, which is what we want
    stored_packed = coding in ("gzip", "x-gzip") and urlsplit(url).path.endswith((".gz", ".tgz"))
    if coding not in ("", "identity") and not stored_packed:
        raise RequestRefused(url, f"the server sends it packed as {coding[:40]!r}, although the request excludes that")
    given = response.headers.get("Content-Length")
    if given is None or response.chunked:  # chunks carry their own lengths
        return None
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise RequestRefused(url, f"the server gives {given[:40]!r} as the length, which is not a number of bytes")
    return int(given)


def blocks(response: http.client.HTTPResponse, left: int | None) -> Iterator[bytes]:
    """Read the body in blocks, `left` bytes or, if that is None, to its end; raise BrokenTransfer if it breaks."""
    while left is None or left > 0:
        try:
            block = response.read1(BLOCK if left is None else min(BLOCK, left))
        except _NETWORK_ERRORS as error:
            raise BrokenTransfer(_reason(error)) from None
        if not block:
            return
        if left is not None:
            left -= len(block)
        yield block


def ask(url: str, target: Path, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Request an address, and return the response whatever its status; redirections are followed.

    Args:
        url: the address.
        target: where the file belongs, for error messages.
        headers: additional headers of the request.
    """
    own = {"User-Agent": f"equipoise/{version('equipoise')}", "Accept-Encoding": "identity"}
    try:
        if urlsplit(url).scheme not in _SCHEMES:
            raise RequestRefused(url, "only http and https addresses are supported", "use one of these")
        answer = _opener().open(request.Request(url, headers=own | headers), timeout=TIMEOUT)
        return cast(http.client.HTTPResponse, answer)
    except HTTPError as error:  # raised for redirections only: other responses are returned as they are
        error.close()
        why = "the server redirects in a circle, or to an address that is not http or https"
        raise RequestRefused(url, why, by_hand(target)) from None
    except _NETWORK_ERRORS as error:
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, socket.gaierror) or (isinstance(cause, OSError) and cause.errno in _NO_NETWORK):
            why = f"its host cannot be reached ({_reason(cause)}), so this machine seems to be offline"
            raise Offline(url, why, f"connect to the network, or put the file at {target} by hand") from None
        lasting = isinstance(cause, (ConnectionRefusedError, ssl.SSLCertVerificationError))
        if isinstance(cause, OSError) and not lasting:
            raise BrokenTransfer(_reason(cause)) from None
        raise RequestRefused(url, _reason(cause), by_hand(target)) from None


def by_hand(target: Path) -> str:
    """Return the advice to get the file in another way."""
    return f"choose another mirror, or put the file at {target} by hand"


def _reason(error: BaseException | str) -> str:
    """Describe an error on one short line, whatever the server has put into it."""
    if isinstance(error, TimeoutError):
        return f"nothing arrived for {TIMEOUT:g} seconds"
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
        return "the server does not answer in HTTP"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__


class _HttpRedirects(request.HTTPRedirectHandler):
    def redirect_request(
        self, req: request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> request.Request | None:
        if urlsplit(newurl).scheme not in _SCHEMES:  # the standard handler also follows to FTP
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _AnyStatus(request.HTTPErrorProcessor):
    """Returns every response as it is, except redirections, which other handlers follow."""

    def http_response(self, request: request.Request, response: http.client.HTTPResponse) -> http.client.HTTPResponse:
        if 300 <= response.status < 400:
            return cast(http.client.HTTPResponse, super().http_response(request, response))
        return response

    https_response = http_response


def _opener() -> request.OpenerDirector:
    """Return an opener without the standard handlers for local files, FTP and data addresses."""
    opener = request.OpenerDirector()
    for handler in (
        *(request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.UnknownHandler),
        *(request.HTTPDefaultErrorHandler, _HttpRedirects, _AnyStatus),
    ):
        opener.add_handler(handler())
    return opener
