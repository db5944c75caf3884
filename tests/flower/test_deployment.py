"""The whole thing: a SuperLink, SuperNodes, TLS and known keys on loopback, killed and resumed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from equipoise.config.experiment import Experiment
from equipoise.runs.launch import run
from tests.support.commands import equipoise_command, one_sentence
from tests.support.waiting import FOREVER, LIMIT, start, until

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


def deploy(folder: Path, *more: str, what: str = "digits.toml") -> "subprocess.Popen[str]":
    """As a user would: from the folder that everything is in."""
    command = [str(BIN / "equipoise"), "deploy", "local", what, "--out", "out", *more]
    return start(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_deployment_from_beginning_to_end(tmp_path: Path) -> None:
    file, out = tmp_path / "digits.toml", tmp_path / "out"
    file.write_text(EXPERIMENT.format(rounds=FOREVER))
    home = out / "deployment" / "flwr"

    killed = deploy(tmp_path, "--clients", "2")
    try:
        until(lambda: (out / "metrics.jsonl").exists(), killed)
        assert any("flower-supernode" in command for command in alive(home))
    finally:
        killed.kill()
    killed.communicate(timeout=LIMIT)
    until(lambda: alive(home) == [])

    words = ("deploy", "local", "digits.toml", "--out", "out", "--set", "data.clients=3", "--resume")
    one_sentence(
        equipoise_command(*words, cwd=tmp_path), 2, "had data.clients = 2, not 3; resume it with the same settings"
    )

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
    assert len((out / "clients.csv").read_text().splitlines()) == 1 + 2
    assert len(list(out.glob("deployment/clients/client-*/state/*/personal.safetensors"))) == 2
