"""Start the processes of one run on this machine, and end all of them together."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from equipoise.distributed.environment import LAUNCHED, LOST
from equipoise.errors import ProcessLost

_GRACE = 10.0  # seconds for the others to end by themselves when one has failed
_OFTEN = 0.05


def run_processes(command: Sequence[str], count: int) -> int:
    """Run a command in several processes that form one run, as torchrun does on one machine.

    The first process has this terminal; what others print is shown only if one of them fails first. Ctrl-C reaches all
    of them.

    Args:
        command: the arguments of `python -m equipoise`.
        count: number of processes.

    Returns:
        The exit code of the first process.
    """
    with tempfile.TemporaryDirectory(prefix="equipoise-") as folder:
        processes = [_start(command, rank, count, Path(folder)) for rank in range(count)]
        before = {number: signal.signal(number, _forward(processes)) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            failed = _wait(processes)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if failed is None or processes[failed].returncode in (130, LOST):
            return processes[0].returncode
        if failed and (said := _log(Path(folder), failed).read_text().strip()):
            print(said, file=sys.stderr)
            return processes[failed].returncode
        if processes[failed].returncode < 0:
            name = signal.Signals(-processes[failed].returncode).name
            raise ProcessLost(
                f"process {failed} of the run was ended by {name}, so the run stopped; everything up to its last "
                f"checkpoint is saved, resume with:\n  {_resume(command, count)}"
            )
        return processes[failed].returncode


def _resume(command: Sequence[str], count: int) -> str:
    resumed = [] if "--resume" in command else ["--resume"]
    return shlex.join(["equipoise", *command, *resumed, "--processes", str(count)])


def _log(folder: Path, rank: int) -> Path:
    return folder / f"process-{rank}.log"


def process_environment(rank: int, count: int, folder: Path) -> dict[str, str]:
    """Return the environment of a process of a run on this machine.

    Args:
        rank: number of the process.
        count: number of processes.
        folder: a new folder, in which they meet.
    """
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        LAUNCHED: f"file://{folder / 'rendezvous'}",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def _start(command: Sequence[str], rank: int, count: int, folder: Path) -> "subprocess.Popen[bytes]":
    log = None if rank == 0 else _log(folder, rank).open("wb")
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "equipoise", *command],
            env=process_environment(rank, count, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on once
        )
    finally:
        if log is not None:
            log.close()


def _forward(processes: Sequence["subprocess.Popen[bytes]"]):  # type: ignore[no-untyped-def]
    def forward(number: int, _: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    return forward


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> int | None:
    """Wait for all processes; return the number of the one that failed first, if one did."""
    failed: int | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        bad = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if bad and failed is None:
            # One that only noticed that another has ended is not the one to report.
            failed = next((rank for rank in bad if codes[rank] != LOST), None)
            deadline = time.monotonic() + _GRACE if deadline == float("inf") else deadline
        time.sleep(_OFTEN)
    codes = [process.poll() for process in processes]
    if failed is None:
        failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0, LOST)), None)
    return failed
