"""Commands in processes of their own, which are forked and not started: importing PyTorch takes seconds."""

import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from equipoise.cli.app import main
from equipoise.runs import launch, local_processes
from tests.support.commands import WIDTH
from tests.support.forked import Forked

__all__ = ["ForkedCommand", "forked_command", "launch"]  # the last one is what commands import late


class ForkedCommand(Forked):
    """The command line in a process that may be killed or interrupted; those that it starts are forked, too."""

    def __init__(self, *arguments: object, cwd: Path, log: Path | None = None, largest_file: int | None = None):
        """Start the command.

        Args:
            arguments: the words after `equipoise`.
            cwd: the folder in which it runs.
            log: gets what it prints; command.log in that folder if it is left out.
            largest_file: the size in bytes above which it cannot write a file, as on a full disk.
        """
        environment = {**os.environ, "COLUMNS": str(WIDTH), "EQUIPOISE_DATA": str(cwd / "data")}
        super().__init__(
            log or cwd / "command.log", _command, cwd, largest_file, *map(str, arguments), environment=environment
        )

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.kill(self._pid(), signal.SIGINT)

    def children(self) -> list[int]:
        """Return the numbers of the processes that it has started, in that order."""
        pid = self._pid()
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def _pid(self) -> int:
        assert self.process.pid is not None
        assert self.process.is_alive(), self.said()
        return self.process.pid


def forked_command(*arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Return a command's exit code, and all that it has printed as its errors."""
    with ForkedCommand(*arguments, cwd=cwd) as process:
        code = process.wait()
    return subprocess.CompletedProcess([*map(str, arguments)], code, "", process.said())


def _command(folder: Path, largest_file: int | None, *arguments: str) -> None:
    os.chdir(folder)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    _be_the_program(arguments)


def _be_the_program(arguments: Sequence[str]) -> None:
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    with mock.patch.object(local_processes, "_start", _fork), mock.patch.object(sys, "argv", ["equipoise", *arguments]):
        main()


class _Child:
    """What `run_processes` uses of a process."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        return self._look(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _fork(command: Sequence[str], rank: int, count: int, folder: Path) -> _Child:
    """Do what `local_processes._start` does, by forking."""
    environment = local_processes.process_environment(rank, count, folder)
    if pid := os.fork():
        return _Child(pid)
    code = 1
    try:
        os.setsid()
        os.environ.update(environment)
        if rank:
            with local_processes._log(folder, rank).open("w") as output:
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(output.fileno(), stream.fileno())
        _be_the_program(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
