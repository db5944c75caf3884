"""A web server on this machine, for tests of downloads."""

import threading
from collections.abc import Iterator

import pytest

from equipoise.data import downloads, http
from equipoise.data.downloads import Remote
from tests.support.publisher import CONTENT, Publisher, md5
from tests.support.waiting import LIMIT


@pytest.fixture(scope="module")
def in_a_hurry() -> Iterator[None]:
    """Try again without a pause, and wait as long as a busy machine may need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(downloads, "PAUSE", 0)
        patch.setattr(http, "TIMEOUT", LIMIT)
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
