"""Start the processes of one run on this machine, and end all of them together."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from equipoise.distributed.environment import LAUNCHED, LOST, PARENT
from equipoise.errors import ProcessLost

INTERRUPTED = 130
"""Exit code of a process that the user interrupted."""
_GRACE = 10.0  # seconds for the others to end by themselves when one has failed
_FAREWELL = 60.0  # the same when the user has interrupted them: trackers may take long to end
_OFTEN = 0.05
Process = subprocess.Popen[bytes]


def run_processes(command: Sequence[str], count: int) -> int:
    """Run a command in several processes that form one run, as torchrun does on one machine.

    The first process has this terminal; what another one printed is shown only if it fails and the first one cannot
    say why. Ctrl-C reaches all of them.

    Args:
        command: the arguments of `python -m equipoise`.
        count: number of processes.

    Returns:
        The exit code of the run.
    """
    processes: list[Process] = []
    forwarded: list[int] = []
    with tempfile.TemporaryDirectory(prefix="equipoise-") as folder:
        handler = _forward(processes, forwarded)
        before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for rank in range(count):
                processes.append(_start(command, rank, count, Path(folder)))
                for number in forwarded:  # it has arrived while they were being started
                    processes[-1].send_signal(number)
            failed = _wait(processes, forwarded)
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if signal.SIGINT in forwarded and processes[0].returncode != 0:
            return INTERRUPTED
        return _result(processes, failed, command, Path(folder))


def _result(processes: Sequence[Process], failed: int | None, command: Sequence[str], folder: Path) -> int:
    """Return the exit code of a run whose processes have ended; report what its first process cannot know."""
    first = processes[0].returncode
    if first >= 0 and first != LOST and (failed is None or first > 0):
        return first  # it has said why
    again = f"everything up to its last checkpoint is saved, resume with:\n  {_resume(command, len(processes))}"
    if failed is None:
        raise ProcessLost(f"the processes of the run have lost each other, so the run stopped; {again}")
    said = _log(folder, failed).read_text().strip() if failed else ""
    code = processes[failed].returncode
    if code > 0 and said:
        print(said, file=sys.stderr)
        return code
    if said:
        print(said, file=sys.stderr)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with code {code}"
    raise ProcessLost(f"process {failed} of the run {how}, so the run stopped; {again}")


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
        PARENT: str(os.getpid()),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def _start(command: Sequence[str], rank: int, count: int, folder: Path) -> Process:
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


def _forward(processes: Sequence[Process], forwarded: list[int]) -> Callable[[int, object], None]:
    """Return a handler that passes signals on, and remembers them."""

    def forward(number: int, _: object) -> None:
        forwarded.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    return forward


def _wait(processes: Sequence[Process], forwarded: Sequence[int]) -> int | None:
    """Wait for all processes; return the number of the one that failed first, if one did.

    One that was interrupted, or only noticed that another has ended, has not failed.
    """
    failed: int | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        failed = _failed(processes) if failed is None else failed
        ended = any(process.poll() is not None for process in processes)
        if deadline == float("inf") and (failed is not None or (forwarded and ended)):
            deadline = time.monotonic() + (_FAREWELL if forwarded else _GRACE)
        time.sleep(_OFTEN)
    return _failed(processes) if failed is None else failed


def _failed(processes: Sequence[Process]) -> int | None:
    bad = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0, INTERRUPTED, LOST)]
    return bad[0] if bad else None
