"""Child processes that never outlive this one, nor does anything that they start."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from equipoise.errors import EquipoiseError
from equipoise.flower import keeper, own_user_only

_PATIENCE = 5.0  # seconds that a process has to end after SIGTERM
_LONGEST_CALL = 300.0  # seconds that a program has which is run to its end; those of Flower take a few
_KILLED = 30.0  # seconds after which everything that was killed is certainly gone


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback address that are not in use now."""
    sockets = [socket.socket() for _ in range(count)]
    for bound in sockets:
        bound.bind(("127.0.0.1", 0))
    ports = [bound.getsockname()[1] for bound in sockets]
    for bound in sockets:
        bound.close()
    return ports


def own_user_command(command: Sequence[str]) -> list[str]:
    """Return the command that runs one of Flower's servers so that it answers to this user only, where that works.

    Args:
        command: the server's command: a console program, or a module of this interpreter (`python -P -m MODULE`).
    """
    if not own_user_only.supported():
        return list(command)
    given = command[2:] if command[:3] == [sys.executable, "-P", "-m"] else command
    return [sys.executable, "-P", own_user_only.__file__, *given]


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


class _KeptProcess(subprocess.Popen[Any]):
    """A program with everything that it starts, below a keeper that ends all of it once this process is gone."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **options: Any):
        self._writing = -1
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise EquipoiseError(f"there is no program {command[0]}; is equipoise[flower] installed?")
        reading, self._writing = os.pipe()
        try:
            super().__init__(
                [sys.executable, "-IS", keeper.__file__, str(reading), *command],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C must not reach them: they are ended in order
                pass_fds=(reading,),
                **options,
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(reading)

    def _close(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def release(self) -> None:
        """Have the keeper kill everything that is left, and wait for its end."""
        self._close()
        self.send_signal(signal.SIGCONT)  # somebody may have stopped the keeper itself
        try:
            self.wait(_KILLED)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()


class Processes:
    """A group of child processes, each with its output in a file; all are ended at the end of the `with` block."""

    def __init__(self, logs: Path, environment: Mapping[str, str]):
        """Create an empty group, with a folder for logs and additional environment variables."""
        self.logs = logs
        # Flower's programs start each other by name, so they must be found in PATH.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.environment = {**os.environ, "PATH": path, **environment}
        self.running: dict[str, _KeptProcess] = {}

    def __enter__(self) -> "Processes":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a program under a name, which is also that of its log."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = _KeptProcess(command, self.environment, stdout=log, stderr=subprocess.STDOUT)

    def call(self, command: Sequence[str], cwd: Path | None = None) -> str:
        """Run a program to its end and return its output."""
        title = " ".join([Path(command[0]).name, *command[1:2]])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        called = _KeptProcess(command, self.environment, cwd=cwd, **pipes)
        try:
            output, errors = called.communicate(timeout=_LONGEST_CALL)
        except subprocess.TimeoutExpired:
            raise EquipoiseError(f"{title} did not end within {_LONGEST_CALL:g} seconds") from None
        finally:
            called.release()
        if called.returncode:
            lines = (output + errors).strip().splitlines()
            raise EquipoiseError(f"{title} failed: {' '.join(lines[-5:])}")
        return str(output)

    def dead(self) -> list[str]:
        """Return the names of the processes that have ended."""
        return [name for name, process in self.running.items() if process.poll() is not None]

    def descendant(self, name: str, program: str) -> psutil.Process | None:
        """Return the process below a started one that runs a certain program, if there is one now.

        Args:
            name: name of the started process.
            program: file name of the program.
        """
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.running[name].pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    # A script has its interpreter before it.
                    if program in (Path(word).name for word in process.cmdline()[:2]):
                        return process
        return None

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
        """End all processes and their descendants: first with SIGTERM, then with SIGKILL."""
        with _signals_ignored():
            for process in self.running.values():
                process.terminate()
            until = time.monotonic() + _PATIENCE
            for process in self.running.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
            for process in self.running.values():
                process.release()
            self.running.clear()


def ended(process: psutil.Process) -> bool:
    """Tell whether a process has ended, perhaps without anybody having heard of it."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
