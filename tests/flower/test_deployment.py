"""The whole thing: a SuperLink, SuperNodes, TLS and known keys on loopback, interrupted, taken down and resumed."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
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
