"""Downloads from publishers: a file is complete and checked or does not exist, and broken downloads are resumed."""

import fcntl
import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import file_digest, md5
from io import FileIO
from pathlib import Path, PurePosixPath

from equipoise.data.http import (
    BrokenTransfer,
    Offline,
    RequestRefused,
    ask,
    blocks,
    length_of_whole,
    total_of_rest,
    validator_of,
)
from equipoise.errors import EquipoiseError
from equipoise.storage.atomic_files import write_json

RETRIES = 3  # after a broken connection
PAUSE = 1.0  # seconds before the first retry, doubled before each further one

Progress = Callable[[int, int | None], None]
"""Called with the number of bytes received so far, and the total, or None if it is unknown."""


@dataclass(frozen=True)
class Remote:
    """A file that a publisher offers for download."""

    name: str
    "path in the data folder, such as mnist/train-images-idx3-ubyte.gz"
    urls: tuple[str, ...]
    "addresses, tried in this order"
    md5: str | None = None
    "checksum that the publisher gives; None: none is published, and the number of samples is checked instead"


def _no_progress(done: int, total: int | None) -> None:
    pass


def fetch(
    remote: Remote,
    folder: Path,
    *,
    mirror: str | None = None,
    progress: Progress = _no_progress,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Download a file unless it exists already, and return its path.

    An existing file is used as it is, without checking its checksum or using the network: it may have been packed
    again, or be a part that somebody put there on purpose. Remove it to download it again.

    Args:
        remote: the file.
        folder: the data folder.
        mirror: address of a folder with files of the same names, used in place of the publisher.
        progress: is called while bytes arrive; the number of bytes decreases only if the download has to start over.
        check: inspects the file before it gets its final name, and raises an EquipoiseError if it is not acceptable.

    Returns:
        The path of the file.
    """
    target = folder / remote.name
    with _write_errors(target):
        if target.is_dir():
            raise EquipoiseError(f"cannot fetch {target}: a folder of that name exists; move it away")
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked_part(target) as part:
        if target.exists():  # another process has just finished the download
            return target
        failure = EquipoiseError(f"no address is known for {remote.name}; put the file at {target} by hand")
        for url in _addresses(remote, mirror):
            try:
                _fetch_checked(url, part, remote.md5, progress)
            except RequestRefused as error:
                failure = error
            else:
                _run_check(part, check)
                part.finish()
                return target
        raise failure


def _run_check(part: "_Part", check: Callable[[Path], None] | None) -> None:
    if check is None:
        return
    try:
        check(part.path)
    except EquipoiseError:
        part.clear()
        raise


def _addresses(remote: Remote, mirror: str | None) -> tuple[str, ...]:
    if mirror is None:
        return remote.urls
    names = [PurePosixPath(url.partition("?")[0]).name for url in (remote.name, *remote.urls)]
    return tuple(dict.fromkeys(f"{mirror.rstrip('/')}/{name}" for name in names))


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EquipoiseError(
            f"cannot write {target}: {error.strerror or error}; free some space or choose another folder with --data"
        ) from None


class _Part:
    """A partial download, and a file next to it with what tells whether the server still has the same content."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(target.name + ".part")
        self.sidecar = target.with_name(target.name + ".part.json")
        self.resumed = False
        # unbuffered: received bytes are in the file at once, however this process ends, and closing cannot fail
        self.file: FileIO = self.path.open("ab+", buffering=0)

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def is_in_place(self) -> bool:
        """Tell whether the file is still in place: another process may have moved it before this one locked it."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def validator(self, url: str) -> str | None:
        """Return the validator to request the rest with, or None if the whole file must be downloaded."""
        if not self.size:
            return None
        try:
            known = json.loads(self.sidecar.read_text(encoding="utf-8"))
            return str(known["validator"]) if known["url"] == url else None
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def clear(self) -> None:
        with _write_errors(self.target):
            self.file.truncate(0)
            self.sidecar.unlink(missing_ok=True)
        self.resumed = False

    def restart(self, url: str, validator: str | None) -> None:
        self.clear()  # first, so that a new validator never belongs to old bytes
        if validator is not None:
            write_json(self.sidecar, {"url": url, "validator": validator})

    def append(self, block: bytes) -> None:
        rest = memoryview(block)
        with _write_errors(self.target):
            while rest:
                rest = rest[self.file.write(rest) :]

    def md5(self) -> str:
        with _write_errors(self.target):
            self.file.seek(0)
            return file_digest(self.file, lambda: md5(usedforsecurity=False)).hexdigest()

    def finish(self) -> None:
        with _write_errors(self.target):
            os.fsync(self.file.fileno())
            self.path.replace(self.target)
            self.sidecar.unlink(missing_ok=True)


@contextmanager
def _locked_part(target: Path) -> Iterator[_Part]:
    """Open the partial download and lock it for this process; the lock ends with the process."""
    while True:
        with _write_errors(target):
            part = _Part(target)
        with part.file:
            with _write_errors(target):
                try:
                    fcntl.flock(part.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise EquipoiseError(
                        f"another process is downloading {target}; wait until it has finished"
                    ) from None
            if not part.is_in_place():
                continue
            try:
                yield part
            finally:
                if not part.size:  # nothing to resume from
                    with suppress(OSError):
                        part.sidecar.unlink(missing_ok=True)
                        part.path.unlink(missing_ok=True)
            return


def _fetch_checked(url: str, part: _Part, expected: str | None, progress: Progress) -> None:
    """Download the file, and compare it with the checksum."""
    for last in (False, True):
        _fetch_whole(url, part, progress)
        if expected is None or (found := part.md5()) == expected.lower():
            return
        resumed = part.resumed
        part.clear()
        if last or not resumed:  # else it may mix two versions: try once more as a whole
            raise RequestRefused(url, f"the download has the md5 checksum {found}, but the publisher gives {expected}")


def _fetch_whole(url: str, part: _Part, progress: Progress) -> None:
    for attempt in range(RETRIES + 1):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            return _transfer(url, part, progress)
        except Offline:
            if attempt in (0, RETRIES):  # in between, the network has just worked and may come back
                raise
        except BrokenTransfer as error:
            failure = f"the connection broke {RETRIES + 1} times, the last time because {error}"
    raise RequestRefused(url, failure, "try again later: the download resumes if the server supports it")


def _transfer(url: str, part: _Part, progress: Progress) -> None:
    response, total = _begin(url, part)
    with response:
        progress(part.size, total)
        for block in blocks(response, None if total is None else total - part.size):
            part.append(block)
            progress(part.size, total)
    if total is not None and part.size != total:
        raise BrokenTransfer(f"only {part.size} of {total} bytes arrived")
    if total is None and not part.size:  # the standard library overlooks a connection that breaks in the headers
        raise BrokenTransfer("nothing arrived")


def _begin(url: str, part: _Part) -> tuple[http.client.HTTPResponse, int | None]:
    """Return a response whose body continues the partial file, and the final length of that file."""
    validator = part.validator(url)
    if validator is not None:
        response = ask(url, part.target, {"Range": f"bytes={part.size}-", "If-Range": validator})
        total = total_of_rest(response, part.size, validator)
        if total is not None:
            part.resumed = True
            return response, total
        if response.status in (http.HTTPStatus.PARTIAL_CONTENT, http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
            response.close()
            part.clear()
            response = ask(url, part.target, {})
    else:
        response = ask(url, part.target, {})
    try:
        length = length_of_whole(url, response, part.target)
        part.restart(url, validator_of(response.headers))
    except BaseException:
        response.close()
        raise
    return response, length
