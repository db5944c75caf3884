"""Child processes that never outlive this one."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from equipoise.errors import EquipoiseError

_PATIENCE = 5.0  # seconds that a process has to end after SIGTERM
_TRIES = 5
_DIES_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG


def _die_with_parent() -> None:
    """Make the kernel send SIGTERM to this child when its parent is gone, however it ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback address that are not in use now."""
    sockets = [socket.socket() for _ in range(count)]
    for bound in sockets:
        bound.bind(("127.0.0.1", 0))
    ports = [bound.getsockname()[1] for bound in sockets]
    for bound in sockets:
        bound.close()
    return ports


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore signals, so that a second Ctrl-C does not interrupt what the first one started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Processes:
    """A group of child processes, each with its output in a file; all are ended at the end of the `with` block."""

    def __init__(self, logs: Path, environment: Mapping[str, str]):
        """Create an empty group, with a folder for logs and additional environment variables."""
        self.logs = logs
        # Flower's programs start each other by name, so they must be found in PATH.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.environment = {**os.environ, "PATH": path, **environment}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a program under a name, which is also that of its log."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,  # Ctrl-C must not reach them: they are ended in order
                preexec_fn=_die_with_parent,
            )

    def call(self, command: Sequence[str], cwd: Path | None = None) -> str:
        """Run a program to its end and return its output."""
        title = " ".join([Path(command[0]).name, *command[1:2]])
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=self.environment, cwd=cwd, stdin=subprocess.DEVNULL
            )
        except FileNotFoundError:
            raise EquipoiseError(f"there is no program {command[0]}; is equipoise[flower] installed?") from None
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise EquipoiseError(f"{title} failed: {' '.join(lines[-5:])}")
        return done.stdout

    def dead(self) -> list[str]:
        """Return the names of the processes that have ended."""
        return [name for name, process in self.running.items() if process.poll() is not None]

    def tail(self, name: str, lines: int = 5) -> str:
        """Return the last lines of a process's log, as one line."""
        text = (self.logs / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return " ".join(line.strip() for line in text[-lines:])

    def await_port(self, name: str, port: int, seconds: float = 60.0) -> None:
        """Wait until a process listens on a port."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if name in self.dead():
                break
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.1)
        raise EquipoiseError(f"{name} did not start; its log in {self.logs} ends with: {self.tail(name)}")

    def end(self) -> None:
        """End all processes and their descendants: first with SIGTERM, then with SIGKILL.

        Flower's programs start others in sessions of their own, so descendants are looked up while their parents exist.
        """
        with _signals_ignored():
            self._end()

    def _end(self) -> None:
        members = self._process_trees()
        self._signal(members, signal.SIGTERM)
        psutil.wait_procs(members, timeout=_PATIENCE)
        for _ in range(_TRIES):  # repeated, because a process may have started another one before its end
            members = [m for m in {*members, *self._process_trees()} if _is_running(m)]
            self._signal(members, signal.SIGKILL)
            if not members:
                break
            psutil.wait_procs(members, timeout=1.0)
        for process in self.running.values():
            process.wait()
        self.running.clear()

    def _process_trees(self) -> list[psutil.Process]:
        """Return the started processes that still run, each followed by its descendants."""
        found: list[psutil.Process] = []
        for process in self.running.values():
            with suppress(psutil.NoSuchProcess):
                if process.poll() is None:  # else another process may have its number by now
                    parent = psutil.Process(process.pid)
                    found += [parent, *parent.children(recursive=True)]
        return found

    def _signal(self, members: Sequence[psutil.Process], number: int) -> None:
        """Signal processes and their process groups; the groups include children whose parent is already gone."""
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(number)
        for process in self.running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
