"""Warm clients of a real deployment: a child is killed, then the resident process, and the rounds go on."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.flower.test_deployment import EXPERIMENT, alive, deploy
from tests.support.waiting import FOREVER, interrupted, until

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


def test_the_rounds_go_on_without_a_child_and_without_the_resident_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "digits.toml").write_text(EXPERIMENT.format(rounds=FOREVER))
    metrics = out / "metrics.jsonl"

    def rounds() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    running = deploy(tmp_path, "--clients", "2")
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
        until(
            lambda: rounds() > before + 1, running
        )  # Flower repeats the message after 30 s, or sends an error after 60
        os.kill(pid, signal.SIGKILL)
        until((out / "deployment" / "warm" / "cold").exists, running)
        before = rounds()
        until(lambda: rounds() > before + 1, running)
        said = " ".join(interrupted(running).split())
    finally:
        running.kill()
    assert running.returncode == 130
    assert alive(out / "deployment" / "flwr") == []
    assert "warm-clients ended" in said
    assert said.count("ran cold, which is slower and gives the same results") == 1
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["left_out"] for line in lines].count(0) >= len(lines) - 2
