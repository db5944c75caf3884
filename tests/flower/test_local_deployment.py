"""What a deployment on this machine does when one of its processes ends."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from equipoise.callbacks.base import Callback
from equipoise.errors import RunFailed
from equipoise.flower.local_deployment import Follower, LocalDeployment
from equipoise.flower.processes import Processes
from tests.support.waiting import LIMIT, until

pytestmark = pytest.mark.deployment


class Told(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


SERVER = "#!/bin/sh\nsleep 1000 &\nwait\n"
FLWR = '#!/bin/sh\necho "$@" >> calls\nif [ -e broken ]; then echo no such node; exit 1; fi\necho "{}"\n'
SUPERLINK = ["sh", "-c", "setsid flwr-serverapp & echo $! > server; wait; exec sleep 1000"]


class Local:
    """A deployment of three clients whose programs only sleep."""

    def __init__(self, folder: Path, minimum: int = 2):
        self.folder, self.told = folder, Told()
        names = ("ward a", "ward b", "ward c")
        experiment = SimpleNamespace(deploy=SimpleNamespace(minimum=minimum))
        app: Any = SimpleNamespace(names=names, experiment=experiment)
        self.deployment = LocalDeployment(app, folder / "run", self.told)
        self.deployment.registered = {self.deployment.node(who): 100 + who for who in range(3)}
        programs = folder / "programs"
        programs.mkdir()
        for name, script in (("flwr-serverapp", SERVER), ("flwr", FLWR)):
            (programs / name).write_text(script)
            (programs / name).chmod(0o755)
        os.mkdir(folder / "run")
        self.processes = Processes(folder / "logs", {"PATH": f"{programs}:{os.environ['PATH']}"})
        self.failure = ""
        self.seen = threading.Event()
        self.thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        try:
            self.deployment._watch(self.processes, Follower(self.deployment.out, self.told), "7")
        except RunFailed as error:
            self.failure = str(error)

    def look(self, *names: str) -> psutil.Process | None:
        """Find a program, and tell that it was found."""
        if (found := Processes.descendant(self.processes, *names)) is not None:
            self.seen.set()
        return found

    def write(self, **event: Any) -> None:
        """Write an event as the server does."""
        with self.deployment.out.events.open("a") as file:
            file.write(json.dumps(event) + "\n")

    @property
    def server(self) -> int:
        return int((self.folder / "server").read_text())

    def kill(self, name: str) -> None:
        """Kill a program that was started, not its keeper."""
        until(lambda: psutil.Process(self.processes.running[name].pid).children())
        for program in psutil.Process(self.processes.running[name].pid).children():
            program.kill()


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.chdir(tmp_path)
    found = Local(tmp_path)
    with found.processes:
        found.processes.start("superlink", SUPERLINK)
        for name in found.deployment.registered:
            found.processes.start(name, ["sleep", "1000"])
        until(lambda: (tmp_path / "server").exists() and (tmp_path / "server").read_text().endswith("\n"))
        monkeypatch.setattr(found.processes, "descendant", found.look)
        found.thread.start()
        until(found.seen.is_set)
        yield found
        found.write(event="finished")
        found.thread.join(LIMIT)


def test_a_dead_server_ends_the_deployment_with_a_sentence(local: Local) -> None:
    os.kill(local.server, signal.SIGKILL)
    local.thread.join(LIMIT)
    log = local.folder / "logs" / "superlink.log"
    assert local.failure == f"the server ended without reporting it; continue with --resume. Its log: {log}"


def test_a_server_that_ends_after_its_report_has_not_failed(local: Local) -> None:
    local.write(event="finished")
    os.kill(local.server, signal.SIGKILL)
    local.thread.join(LIMIT)
    assert local.failure == ""


def test_a_dead_superlink_ends_the_deployment_with_a_sentence(local: Local) -> None:
    local.kill("superlink")
    local.thread.join(LIMIT)
    # Its descendants end with it, so either of the two may be seen first.
    assert "continue with --resume" in local.failure


def test_a_dead_supernode_is_removed_so_that_nobody_waits_for_it(local: Local) -> None:
    local.kill("client-001")
    until(lambda: (local.folder / "calls").exists())
    assert (local.folder / "calls").read_text() == "supernode unregister 101 deployment --format json\n"
    log = local.folder / "logs" / "client-001.log"
    assert local.told.texts == [f"client-001 ended; the rounds continue without it. Its log: {log}"]
    local.write(event="message", text="another round")
    until(lambda: "another round" in local.told.texts)
    assert local.failure == ""


def test_a_supernode_that_cannot_be_removed_does_not_end_the_run(local: Local) -> None:
    (local.folder / "broken").touch()
    local.kill("client-002")
    until(lambda: len(local.told.texts) == 2)
    assert local.told.texts[1] == "a round may wait a minute for client-002: flwr supernode failed: no such node"
    assert local.thread.is_alive()


def test_too_few_supernodes_end_the_deployment_with_a_sentence(local: Local) -> None:
    local.kill("client-000")
    until(lambda: (local.folder / "calls").exists())
    local.kill("client-002")
    local.thread.join(LIMIT)
    log = local.folder / "logs" / "client-002.log"
    assert local.failure == (
        f"client-002 ended; 1 clients are left, and a round needs 2; continue with --resume. Its log: {log}"
    )
