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
from equipoise.data.downloads import Remote
from equipoise.data.sources import SOURCES, electricity, medical
from equipoise.errors import EquipoiseError
from tests.support import datafiles
from tests.support.commands import equipoise_command, one_sentence


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


def get(name: str, folder: Path, mirror: str, meter: catalogue.Meter) -> catalogue.CatalogueEntry:
    """What the command does."""
    catalogue.download(name, folder, mirror, meter)
    return catalogue.verify(name, folder, lambda done, total: None)


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


@pytest.mark.slow
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
        get("cifar10", data, url, nothing)
    assert list(data.iterdir()) == []
    remote = Remote("cifar-10-binary.tar.gz", ("http://127.0.0.1:9/no",), hashlib.md5(content).hexdigest())
    monkeypatch.setattr(SOURCES["cifar10"], "remotes", (remote,))
    seen = []
    entry = get("cifar10", data, url, lambda name, done, total: seen.append((name, done, total)))
    assert entry.detail == "72 of 60,000 samples"
    assert (data / "cifar-10-binary.tar.gz").read_bytes() == content
    assert seen[-1] == ("cifar-10-binary.tar.gz", len(content), len(content))
    (served / "cifar-10-binary.tar.gz").unlink()
    assert get("cifar10", data, url, nothing) == entry  # it is there: nobody is asked


def test_without_a_checksum_the_counts_decide(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, served = server
    datafiles.medical(served / "medical-mnist.zip")
    data = tmp_path / "data"
    with pytest.raises(EquipoiseError, match="is incomplete"):
        get("medical-mnist", data, url, nothing)
    assert list(data.iterdir()) == []
    monkeypatch.setattr(medical, "_WHOLE", 18)
    good = (served / "medical-mnist.zip").read_bytes()
    (served / "medical-mnist.zip").write_bytes(good[:2000] + bytes(60) + good[2060:])
    with pytest.raises(EquipoiseError, match="not the expected data"):  # the counts are right, a picture is not
        get("medical-mnist", data, url, nothing)
    assert list(data.iterdir()) == []
    (served / "medical-mnist.zip").write_bytes(good)
    assert get("medical-mnist", data, url, nothing).state == "complete"
    (served / "medical-mnist.zip").write_bytes(b"<html>not found</html>")
    with pytest.raises(EquipoiseError, match="not the expected data"):
        get("medical-mnist", tmp_path / "other", url, nothing)
    assert list((tmp_path / "other").iterdir()) == []


def test_what_came_has_no_name_before_it_is_counted(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it is counted leaves no file that the next call would take for a whole one."""
    url, served = server
    datafiles.uci(served / "electricity.zip", zipped=True)
    look_at = SOURCES["electricity"].look_at

    def interrupted(self: object, path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SOURCES["electricity"], "look_at", interrupted)
    with pytest.raises(KeyboardInterrupt):
        get("electricity", tmp_path / "data", url, nothing)
    assert not (tmp_path / "data" / "electricity.zip").exists()
    monkeypatch.setattr(SOURCES["electricity"], "look_at", look_at)
    with pytest.raises(EquipoiseError, match="1,200 of 51,894,720 values"):
        get("electricity", tmp_path / "data", url, nothing)
    assert not [p for p in (tmp_path / "data").iterdir() if p.name.endswith("zip")]


def test_another_file_of_the_set_is_not_counted_in_its_place(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, served = server
    data = tmp_path / "data"
    data.mkdir()
    datafiles.electricity(data / "electricity.csv.gz")
    datafiles.uci(served / "electricity.zip", zipped=True)
    monkeypatch.setattr(electricity, "_whole", lambda minutes: (3, 400) if minutes == 15 else (321, 26_304))
    entry = get("electricity", data, url, nothing)
    assert (data / "electricity.zip").exists()
    assert "it is used in place of electricity.zip" in entry.detail
    (data / "electricity.csv.gz").unlink()
    assert get("electricity", data, url, nothing).state == "complete"


def test_a_damaged_file_that_is_there_is_told_of(tmp_path: Path) -> None:
    datafiles.mnist(tmp_path / "mnist", packed=True)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-500])
    assert catalogue.entry("mnist", tmp_path).state == "damaged"
    with pytest.raises(EquipoiseError, match=r"mnist are there, but cannot be used: .* remove it and fetch it again"):
        get("mnist", tmp_path, "http://127.0.0.1:9", nothing)
    path.unlink()
    datafiles.everything(tmp_path / "whole")
    (tmp_path / "whole" / "mnist" / "qmnist-test-labels-idx2-int.gz").write_bytes(b"")
    assert catalogue.entry("digits-by-writer", tmp_path / "whole").state == "damaged"
    assert catalogue.entry("mnist", tmp_path / "whole").state == "subset"


def test_more_hours_do_not_make_up_for_fewer_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datafiles.electricity(tmp_path / "electricity.csv.gz", clients=2, hours=400)
    monkeypatch.setattr(electricity, "_whole", lambda minutes: (4, 100))
    assert catalogue.entry("electricity", tmp_path).detail == "200 of 400 values"


def test_numbers_in_leafs_heads_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "femnist").mkdir()
    path = tmp_path / "femnist" / "a.json"
    path.write_text('{"users": ["a"], "num_samples": [' + "9" * 5000 + "]}")
    assert catalogue.entry("femnist", tmp_path).state == "present"
    path.write_text('{"users": [], "user_data": {}}')
    assert catalogue.entry("femnist", tmp_path).state == "present"


def test_the_commands(server: tuple[str, Path], tmp_path: Path) -> None:
    url, served = server
    run = partial(equipoise_command, cwd=tmp_path)
    listed = json.loads(run("data", "list", "--json").stdout)
    assert [entry["name"] for entry in listed] == list(SOURCES)
    assert "missing" in run("data", "list").stdout
    one_sentence(run("data", "get", "cifar11"), 2, "there is no data set 'cifar11'", "did you mean 'cifar10'?")
    one_sentence(run("data", "get", "linear"), 2, "drawn from the seed")
    one_sentence(run("data", "get", "femnist"), 2, "github.com/TalwalkarLab/leaf")
    one_sentence(run("data", "get", "cifar10", "--from", url), 2, "404", "put the file at")
    assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
    (served / "cifar-10-binary.tar.gz").write_bytes(b"something else")
    one_sentence(run("data", "get", "cifar10", "--from", url), 2, "checksum")
    assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
