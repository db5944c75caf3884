"""The child of the resident process, which becomes the process of one client for one message."""

import atexit
import os
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Request:
    """What the shim hands over."""

    umask: int
    program: str
    "path of the real program, which the child takes as its name"
    facts: str
    "modification time, size and inode of that program"
    arguments: Sequence[str]
    environment: Mapping[bytes, bytes]
    files: Sequence[int]
    "standard input, output and error, and the current folder"

    @staticmethod
    def parse(body: bytes, files: Sequence[int]) -> "Request":
        """Read a request; raises ValueError or IndexError if it is damaged."""
        umask, program, facts, count, *rest = body.split(b"\0")
        arguments, variables = rest[: int(count)], rest[int(count) :]
        if len(files) != 4 or len(arguments) != int(count):
            raise ValueError("a request is incomplete")
        environment = dict(variable.split(b"=", 1) for variable in variables)
        names = [os.fsdecode(argument) for argument in arguments]
        return Request(int(umask), os.fsdecode(program), facts.decode(), names, environment, files)


def send(connection: socket.socket, text: str, files: Sequence[int] = ()) -> None:
    """Send one line to the shim, which may be gone."""
    line = (text.replace("\n", " ")[:2000] + "\n").encode(errors="replace")
    with suppress(OSError):
        if files:
            socket.send_fds(connection, [line], list(files))
        else:
            connection.sendall(line)


def run(connection: socket.socket, request: Request, main: Callable[[], Any]) -> NoReturn:
    """Become the process that the shim stands for, run Flower's entry point, and end.

    Args:
        connection: the connection to the shim.
        request: what the shim handed over.
        main: the entry point of the program.
    """
    code = 1
    try:
        try:
            connection.settimeout(None)
            _become(request)
            own = os.pidfd_open(os.getpid())
        except Exception as error:  # nothing has been run, so the shim may start the real program
            send(connection, f"cold {type(error).__name__}: {error}")
            os._exit(1)
        send(connection, "started", [own])
        os.close(own)
        code = _call(main)
    finally:
        # Ending the interpreter takes 0.2 s, so only what it would do for the program is done.
        _finish()
        send(connection, f"exit {code}")
        os._exit(code)


def _become(request: Request) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    *standard, folder = request.files
    for place, file in enumerate(standard):
        os.dup2(file, place)
    os.fchdir(folder)
    for file in request.files:
        os.close(file)
    os.umask(request.umask)
    os.environb.clear()
    os.environb.update(request.environment)
    sys.argv = [request.program, *request.arguments]
    _reseed()


def _reseed() -> None:
    """Draw new seeds; otherwise all children would draw the same random numbers."""
    random.seed(os.urandom(32))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(list(os.urandom(32)))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int.from_bytes(os.urandom(8), "big", signed=True))


def _call(main: Callable[[], Any]) -> int:
    """Return the exit code that a console script would have."""
    try:
        result = main()
    except SystemExit as end:
        result = end.code
    except KeyboardInterrupt:
        traceback.print_exc()
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    if result is None or isinstance(result, int):
        return (result or 0) & 0xFF
    print(result, file=sys.stderr)
    return 1


def _finish() -> None:
    """Wait for threads, run exit functions and flush, as the interpreter does before it takes itself apart."""
    for step in (getattr(threading, "_shutdown", None), getattr(atexit, "_run_exitfuncs", None)):
        if step is not None:
            with suppress(BaseException):
                step()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
