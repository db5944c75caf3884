"""The whole thing: a SuperLink, SuperNodes, TLS and known keys on loopback, interrupted, taken down and resumed."""

import json
import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from equipoise.config.experiment import Experiment
from equipoise.flower.credentials import write_certificates, write_key
from equipoise.flower.processes import free_ports
from equipoise.runs.launch import run
from tests.support.waiting import FOREVER, LIMIT, interrupted, start, until

if sys.platform != "linux":
    pytest.skip("looks for processes in /proc", allow_module_level=True)

pytestmark = [pytest.mark.deployment, pytest.mark.slow]
EXPERIMENT = """
rounds = {rounds}
[data]
name = "digits-by-writer"
clients = 2
[model]
name = "softmax"
[algorithm]
name = "ditto"
lr = 0.1
[engine]
precision = "float64"
"""
BIN = Path(sys.executable).parent


def alive(home: Path) -> list[str]:
    """The processes of a deployment that are still there, wherever they belong now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={home}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


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


def deploy(folder: Path, *more: str) -> "subprocess.Popen[str]":
    """As a user would: from the folder that everything is in."""
    command = [str(BIN / "equipoise"), "deploy", "local", "digits.toml", "--out", "out", *more]
    return start(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


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


def test_a_deployment_from_beginning_to_end(tmp_path: Path) -> None:
    file, out = tmp_path / "digits.toml", tmp_path / "out"
    file.write_text(EXPERIMENT.format(rounds=FOREVER))
    home = out / "deployment" / "flwr"

    first = deploy(tmp_path, "--clients", "2")
    try:
        until(lambda: (out / "metrics.jsonl").exists(), first)
        assert any("flower-supernode" in command for command in alive(home))
        address = tomllib.loads((home / "config.toml").read_text())["superlink"]["deployment"]["address"]
        assert address.startswith("127.0.0.1:")
        ports = listening(home)
        assert int(address.rpartition(":")[2]) in ports
        assert len(ports) == 3, "the SuperLink and two SuperNodes"
        assert all("own_user_only.py" in command for command in ports.values())
        if os.getuid() == 0:  # the SuperLink speaks TLS only, and is tried by others
            nodes = [str(port) for port, command in ports.items() if "flower-supernode" in command]
            done = subprocess.run(
                [sys.executable, "-c", STRANGER, *nodes], capture_output=True, text=True, timeout=LIMIT
            )
            assert done.stdout.split() == ["b''", "b''"], done.stderr
        logs = tmp_path / "intruder"
        logs.mkdir()
        said = intruder(logs, address, out / "deployment" / "keys" / "ca.crt", logs)
        assert "Failed to activate SuperNode" in said
        write_certificates(tmp_path / "other", ["127.0.0.1"])
        said = intruder(logs, address, tmp_path / "other" / "ca.crt", logs)
        assert "CERTIFICATE_VERIFY_FAILED" in said
        said = interrupted(first)
    finally:
        first.kill()
    assert first.returncode == 130
    assert "--resume" in said
    assert "Traceback" not in said
    assert alive(home) == []
    assert "Attempted to register SuperNode with public key" in (
        out / "deployment" / "logs" / "superlink.log"
    ).read_text(errors="replace")

    other = deploy(tmp_path, "--set", "data.clients=3", "--resume")
    _, said = other.communicate(timeout=LIMIT)
    assert other.returncode == 2
    assert "had data.clients = 2, not 3; resume it with the same settings" in " ".join(said.split())

    killed = deploy(tmp_path, "--resume")
    try:
        until(lambda: any("flwr-serverapp" in command for command in alive(home)), killed)
    finally:
        killed.kill()
    killed.communicate(timeout=LIMIT)
    until(lambda: alive(home) == [])

    rounds = len((out / "metrics.jsonl").read_text().splitlines()) + 2
    file.write_text(EXPERIMENT.format(rounds=rounds))
    second = deploy(tmp_path, "--clients", "2", "--resume")
    try:
        output, said = second.communicate(timeout=LIMIT)
    finally:
        second.kill()
    assert second.returncode == 0, said
    assert "ditto" in output
    assert alive(home) == []

    simulated = run(Experiment.load(file), tmp_path / "simulated")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    for ours, theirs in zip(lines, simulated.metrics, strict=True):
        for kind in ("personal", "global", "hybrid"):
            for name, value in theirs[kind].items():
                np.testing.assert_allclose(ours[kind][name], value, rtol=1e-9, atol=1e-12, err_msg=f"{kind} {name}")
    assert (out / "deployment").stat().st_mode & 0o077 == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["mode"], summary["refused"]) == ("flower", {})
