"""A small program that runs another one and ends everything that this one has started, however far it got away.

    python -IS keeper.py PIPE PROGRAM [ARGUMENT ...]
    python -IS keeper.py - PROGRAM [ARGUMENT ...]

PIPE is the number of a file descriptor: the reading end of a pipe whose writing end only the owner of this process has.
When the owner is gone, even by `kill -9`, the pipe ends, and everything is killed. The same happens when the program
ends by itself. Flower's programs start others in sessions of their own; on Linux all of them stay below this process,
because orphans are handed to it (PR_SET_CHILD_SUBREAPER), so that nothing is left once it has no children.

SIGTERM is passed on to everything below; those that end in order then have as long as the owner lets them.

With `-` this process is the owner itself, for a program that runs in the foreground or as a service: it passes signals
on to the program alone, and ends as the program does.

It needs only the standard library, so that it starts at once and stays small.
"""

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_LINUX = sys.platform == "linux"
_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36  # numbers of Linux's prctl
_PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def parents() -> dict[int, int]:
    """Return the parent of every process of this machine."""
    found = {}
    if not _LINUX:
        with os.popen("ps -A -o pid=,ppid=") as output:
            return {int(pid): int(parent) for pid, parent in (line.split() for line in output)}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found[int(folder.name)] = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has just ended
            continue
    return found


def descendants(root: int) -> list[int]:
    """Return all processes below one, parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found = list(children.get(root, []))
    for pid in found:  # which grows meanwhile
        found += children.get(pid, [])
    return found


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _passed() -> list[int]:
    """Return the signals that are passed on: not those that this process was told to ignore, as by nohup."""
    return [number for number in _PASSED if signal.getsignal(number) != signal.SIG_IGN]


def _start(command: list[str], pipe: int, handled: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.close(pipe)
        for number in (*handled, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _kill_all() -> None:
    """Kill everything below this process.

    Only children are killed, again and again: whatever is below them is handed to this process when they are gone, and
    the number of a child cannot belong to another process yet. Without children there are no descendants.
    """
    me = os.getpid()
    while True:
        for pid in [pid for pid, parent in parents().items() if parent == me] if _LINUX else descendants(me):
            _signal(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main(pipe: int, command: list[str], alone: bool = False) -> NoReturn:
    """Run the program to its end, or to the owner's, and leave nothing behind.

    Args:
        pipe: the reading end of the pipe.
        command: the program and its arguments.
        alone: whether only the program gets signals, and what it has started is killed when it has ended.
    """
    _prctl(_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    asked: list[int] = []
    handled: list[int] = _passed() if alone else [signal.SIGTERM]
    for number in handled:
        signal.signal(number, lambda number, _: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    program = _start(command, pipe, handled)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    ending, code, owned = False, None, True
    while owned:
        ready = select.select([pipe, woken], [], [])[0]
        owned = pipe not in ready  # nobody writes, so that it is readable only at its end
        if woken in ready:
            os.read(woken, 4096)
        if alone:
            while asked:
                _signal(program, asked.pop(0))
        elif asked and not ending:
            ending = True
            for pid in descendants(os.getpid()):
                _signal(pid, signal.SIGTERM)
        left = True
        while left:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                left = False
                break
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
            if not pid:
                break
        if code is not None and not (ending and left):
            break
    _kill_all()
    os._exit(128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code)


def own(command: list[str]) -> NoReturn:
    """Own a keeper, and end as its program ends.

    Args:
        command: the program and its arguments.
    """
    passed = _passed()
    _prctl(_CHILD_SUBREAPER, 1)  # should the keeper itself be killed
    signal.pthread_sigmask(signal.SIG_BLOCK, passed)
    reading, writing = os.pipe()
    keeper = os.fork()
    if not keeper:
        os.close(writing)
        os.setsid()  # Ctrl-C is for the owner, who passes it on
        main(reading, command, alone=True)
    os.close(reading)
    for number in passed:
        signal.signal(number, lambda number, _: _signal(keeper, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    _, status = os.waitpid(keeper, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _kill_all()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    if sys.argv[1] == "-":
        own(sys.argv[2:])
    main(int(sys.argv[1]), sys.argv[2:])
