"""A real deployment of one's own app that is disturbed: strangers and intruders try to join, a warm client and the
resident process are killed, and the rounds go on until Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import tomli_w

from equipoise.flower.credentials import write_certificates, write_key
from equipoise.flower.processes import free_ports
from tests.flower.test_deployment import BIN, alive, deploy
from tests.flower.test_own_apps import APP, DEPLOY
from tests.support.waiting import FOREVER, LIMIT, interrupted, until

if sys.platform != "linux":
    pytest.skip("looks for processes in /proc", allow_module_level=True)

pytestmark = [pytest.mark.deployment, pytest.mark.slow]


def threads_of_children(pid: int) -> dict[int, int]:
    """The number of threads of every child of a process."""
    found = {}
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with suppress(OSError):
            found[child] = len(os.listdir(f"/proc/{child}/task"))
    return found


def resident(folder: Path) -> int:
    """The number of the resident process, from its log."""
    log = folder / "deployment" / "logs" / "warm-clients.log"
    until(lambda: log.exists() and "ready" in log.read_text())
    return int(log.read_text().split("resident process ")[1].split(":")[0])


def listening(home: Path) -> dict[int, str]:
    """The ports on which the processes of a deployment listen, and the commands of these."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FLWR_HOME") == str(home):
                ports = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                found |= dict.fromkeys(ports, " ".join(process.cmdline()))
    return found


# It becomes somebody else only when it has imported everything, as that user may not be able to read Python's files.
STRANGER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
for port in sys.argv[1:]:
    with socket.socket() as connection:
        connection.connect(("127.0.0.1", int(port)))
        try:
            connection.sendall(b"GET /health HTTP/1.1\\r\\nHost: here\\r\\n\\r\\n")
            print(connection.recv(100))
        except ConnectionError:
            print(b"")
"""


def intruder(folder: Path, address: str, authority: Path, logs: Path) -> str:
    """What a SuperNode with a key that nobody registered, or with another authority's certificate, comes to."""
    write_key(folder / "key")
    (port,) = free_ports(1)
    command = ["flower-supernode", "--superlink", address, "--root-certificates", str(authority), "--max-retries", "1"]
    command += ["--auth-supernode-private-key", str(folder / "key"), "--port", str(port), "--max-wait-time", str(LIMIT)]
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "FLWR_TELEMETRY_ENABLED": "0"}
    environment |= {"FLWR_HOME": str(logs), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    log = folder / "log"  # a file: what it started would keep a pipe open for a while
    with log.open("w") as output:
        assert subprocess.run(command, stdout=output, stderr=output, env=environment, timeout=LIMIT).returncode != 0
    return log.read_text()


def test_the_rounds_go_on_whatever_disturbs_them(tmp_path: Path) -> None:
    """One test, because a deployment takes long to start, and Flower long to miss a dead child."""
    out = tmp_path / "out"
    home, metrics = out / "deployment" / "flwr", out / "metrics.jsonl"
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "app.py").write_text(APP)
    (tmp_path / "app" / "experiment.toml").write_text(tomli_w.dumps({"rounds": FOREVER, "deploy": DEPLOY}))

    def rounds() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    running = deploy(tmp_path, "--clients", "2", what="app")
    try:
        until(lambda: rounds() >= 1, running)
        pid = resident(out)
        assert not (out / "deployment" / "warm" / "cold").exists()  # all messages so far were warm

        def kill() -> bool:
            """Kill a child that is at work: Flower has started threads in it."""
            for child, threads in threads_of_children(pid).items():
                if threads > 1:
                    os.kill(child, signal.SIGKILL)
                    return True
            return False

        until(kill, running)
        before = rounds()
        strangers_and_intruders_are_refused(tmp_path, out)
        until(
            lambda: rounds() > before + 1, running
        )  # Flower repeats the message after 30 s, or sends an error after 60
        os.kill(pid, signal.SIGKILL)
        until((out / "deployment" / "warm" / "cold").exists, running)
        before = rounds()
        until(lambda: rounds() > before, running)
        said = " ".join(interrupted(running).split())
    finally:
        running.kill()
    assert running.returncode == 130
    assert alive(home) == []
    assert "--resume" in said
    assert "Traceback" not in said
    written = tomllib.loads((out / "run.toml").read_text())
    assert (written["algorithm"]["name"], written["algorithm"]["extra"]) == ("app.py:Mine", 2.0)
    assert "warm-clients ended" in said
    assert said.count("ran cold, which is slower and gives the same results") == 1
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["left_out"] for line in lines].count(0) >= len(lines) - 2
    assert "Attempted to register SuperNode with public key" in (
        out / "deployment" / "logs" / "superlink.log"
    ).read_text(errors="replace")


def strangers_and_intruders_are_refused(folder: Path, out: Path) -> None:
    home = out / "deployment" / "flwr"
    address = tomllib.loads((home / "config.toml").read_text())["superlink"]["deployment"]["address"]
    assert address.startswith("127.0.0.1:")
    ports = listening(home)
    assert int(address.rpartition(":")[2]) in ports
    assert len(ports) == 3, "the SuperLink and two SuperNodes"
    assert all("own_user_only.py" in command for command in ports.values())
    if os.getuid() == 0:  # the SuperLink speaks TLS only, and is tried by others
        nodes = [str(port) for port, command in ports.items() if "flower-supernode" in command]
        done = subprocess.run([sys.executable, "-c", STRANGER, *nodes], capture_output=True, text=True, timeout=LIMIT)
        assert done.stdout.split() == ["b''", "b''"], done.stderr
    logs = folder / "intruder"
    logs.mkdir()
    said = intruder(logs, address, out / "deployment" / "keys" / "ca.crt", logs)
    assert "Failed to activate SuperNode" in said
    write_certificates(folder / "other", ["127.0.0.1"])
    said = intruder(logs, address, folder / "other" / "ca.crt", logs)
    assert "CERTIFICATE_VERIFY_FAILED" in said
