"""Programs that run beside this one and never outlive it."""

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

_PATIENCE = 5.0  # seconds from a request to end to the end
_TRIES = 5
_DIES_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG


def _die_with_parent() -> None:
    """In the child: be asked to end when the parent is gone, however it went (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not break off what the first one asked for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Processes:
    """A group of them, each with its output in a file; all end with the block."""

    def __init__(self, logs: Path, environment: Mapping[str, str]):
        self.logs = logs
        # Flower's programs start each other by name.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.environment = {**os.environ, "PATH": path, **environment}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, command: Sequence[str]) -> None:
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,  # Ctrl-C is for us; they are ended in order
                preexec_fn=_die_with_parent,
            )

    def call(self, command: Sequence[str], cwd: Path | None = None) -> str:
        """Run one to its end and return what it prints."""
        what = " ".join([Path(command[0]).name, *command[1:2]])
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=self.environment, cwd=cwd, stdin=subprocess.DEVNULL
            )
        except FileNotFoundError:
            raise EquipoiseError(f"there is no program {command[0]}; is equipoise[flower] installed?") from None
        if done.returncode:
            said = (done.stdout + done.stderr).strip().splitlines()
            raise EquipoiseError(f"{what} failed: {' '.join(said[-5:])}")
        return done.stdout

    def dead(self) -> list[str]:
        return [name for name, process in self.running.items() if process.poll() is not None]

    def tail(self, name: str, lines: int = 5) -> str:
        text = (self.logs / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return " ".join(line.strip() for line in text[-lines:])

    def await_port(self, name: str, port: int, seconds: float = 60.0) -> None:
        """Until somebody listens there."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if name in self.dead():
                break
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.1)
        raise EquipoiseError(f"{name} did not start; its log in {self.logs} ends with: {self.tail(name)}")

    def end(self) -> None:
        """Ask all to end, children and theirs, then insist.

        Flower's programs start others in sessions of their own, so whole families are looked up while they are whole.
        """
        with _undisturbed():
            self._end()

    def _end(self) -> None:
        members = self._families()
        self._signal(members, signal.SIGTERM)
        psutil.wait_procs(members, timeout=_PATIENCE)
        for _ in range(_TRIES):  # parents first, and again: who is ended late may have started another
            members = [m for m in {*members, *self._families()} if _runs(m)]
            self._signal(members, signal.SIGKILL)
            if not members:
                break
            psutil.wait_procs(members, timeout=1.0)
        for process in self.running.values():
            process.wait()
        self.running.clear()

    def _families(self) -> list[psutil.Process]:
        """All that were started and are still there, with their children; parents before children."""
        found: list[psutil.Process] = []
        for process in self.running.values():
            with suppress(psutil.NoSuchProcess):
                if process.poll() is None:  # else its number may be somebody else's by now
                    parent = psutil.Process(process.pid)
                    found += [parent, *parent.children(recursive=True)]
        return found

    def _signal(self, members: Sequence[psutil.Process], number: int) -> None:
        """To each, and to the groups that they lead: children whose parent has gone are found by nothing else."""
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(number)
        for process in self.running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
