"""`equipoise data list` and `equipoise data get`, against a server on loopback."""

import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from equipoise.data import catalogue
from equipoise.data.download import Remote
from equipoise.data.sources import SOURCES, medical
from equipoise.errors import EquipoiseError
from tests import datafiles
from tests.test_cli import equipoise_command, one_sentence


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", folder
    http.shutdown()
    thread.join()
    http.server_close()


def nothing(name: str, done: int, total: int | None) -> None:
    pass


def test_list_tells_what_is_there(tmp_path: Path) -> None:
    states = {e.name: e.state for e in catalogue.entries(tmp_path)}
    assert states.keys() == SOURCES.keys()
    assert states["digits-by-writer"] == "bundled"
    assert states["linear"] == states["polynomial"] == "generated"
    assert states["cifar10"] == states["femnist"] == "missing"
    datafiles.everything(tmp_path)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"\x1f\x8bnothing")
    entries = {e.name: e for e in catalogue.entries(tmp_path)}
    assert entries["mnist"].detail == "80 of 70,000 samples"
    assert entries["mnist"].where == str(tmp_path / "mnist")
    assert entries["cifar10"].state == "damaged"
    assert entries["cifar100"].detail == "24 of 60,000 samples"
    assert entries["medical-mnist"].detail == "18 of 58,954 samples"
    assert entries["femnist"].detail == "27 of 805,263 samples"
    assert entries["electricity"].detail == "800 of 8,443,584 values"


def test_list_says_complete_of_the_real_data(real_data: Path) -> None:
    states = {e.name: e.state for e in catalogue.entries(real_data)}
    assert [states[n] for n in ("mnist", "fashion-mnist", "digits-by-writer")] == ["complete"] * 3
    assert [states[n] for n in ("cifar10", "cifar100", "medical-mnist", "electricity")] == ["subset"] * 4


def test_get_fetches_verifies_and_leaves_alone(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, served = server
    datafiles.cifar(served / "cifar-10-binary.tar.gz")
    content = (served / "cifar-10-binary.tar.gz").read_bytes()
    data = tmp_path / "data"
    with pytest.raises(EquipoiseError, match="checksum"):  # not the publisher's file
        catalogue.get("cifar10", data, url, nothing)
    assert list(data.iterdir()) == []
    remote = Remote("cifar-10-binary.tar.gz", ("http://127.0.0.1:9/no",), hashlib.md5(content).hexdigest())
    monkeypatch.setattr(SOURCES["cifar10"], "remotes", (remote,))
    seen = []
    entry = catalogue.get("cifar10", data, url, lambda name, done, total: seen.append((name, done, total)))
    assert entry.detail == "72 of 60,000 samples"
    assert (data / "cifar-10-binary.tar.gz").read_bytes() == content
    assert seen[-1] == ("cifar-10-binary.tar.gz", len(content), len(content))
    (served / "cifar-10-binary.tar.gz").unlink()
    assert catalogue.get("cifar10", data, url, nothing) == entry  # it is there: nobody is asked


def test_without_a_checksum_the_counts_decide(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, served = server
    datafiles.medical(served / "medical-mnist.zip")
    data = tmp_path / "data"
    with pytest.raises(EquipoiseError, match="not all of it"):
        catalogue.get("medical-mnist", data, url, nothing)
    assert list(data.iterdir()) == []
    monkeypatch.setattr(medical, "_WHOLE", 18)
    assert catalogue.get("medical-mnist", data, url, nothing).state == "complete"
    (served / "medical-mnist.zip").write_bytes(b"<html>not found</html>")
    with pytest.raises(EquipoiseError, match="not all of it"):
        catalogue.get("medical-mnist", tmp_path / "other", url, nothing)
    assert list((tmp_path / "other").iterdir()) == []


def test_the_commands(server: tuple[str, Path], tmp_path: Path) -> None:
    url, served = server
    run = partial(equipoise_command, cwd=tmp_path)
    listed = json.loads(run("data", "list", "--json").stdout)
    assert [entry["name"] for entry in listed] == list(SOURCES)
    assert "missing" in run("data", "list").stdout
    one_sentence(run("data", "get", "cifar11"), 2, "there is no data set 'cifar11'", "did you mean 'cifar10'?")
    one_sentence(run("data", "get", "linear"), 2, "drawn from the seed")
    one_sentence(run("data", "get", "femnist"), 2, "github.com/TalwalkarLab/leaf")
    one_sentence(run("data", "get", "cifar10", "--from", url), 2, "404", "put the file by hand")
    assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
    (served / "cifar-10-binary.tar.gz").write_bytes(b"something else")
    one_sentence(run("data", "get", "cifar10", "--from", url), 2, "checksum")
    assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
