"""Waiting for a condition, and never for a time: tests must pass on a machine that is busy with other things."""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

LIMIT = 300.0
"""Seconds after which a test is given up; it only guards against hanging, so it is far more than any test needs."""

FOREVER = 10**7
"""Rounds of a run that is still at work when it is interrupted, however late that happens."""

_LIBC = ctypes.CDLL(None)


def start(command: Sequence[object], **options: Any) -> "subprocess.Popen[str]":
    """Start a program that may run for ever: it heeds Ctrl-C, and on Linux it never outlives this process."""
    return subprocess.Popen([*map(str, command)], text=True, preexec_fn=_prepare, **options)


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what shells start in the background ignores it
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def until(condition: Callable[[], object], process: "subprocess.Popen[str] | None" = None) -> None:
    """Wait until the condition holds; fail at once if the process that is to fulfil it ends before."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.01)


def interrupted(process: "subprocess.Popen[str]", condition: Callable[[], object] = lambda: True) -> str:
    """Press Ctrl-C once the condition holds; return what the process has printed to its standard error."""
    try:
        until(condition, process)
        process.send_signal(signal.SIGINT)
        return process.communicate(timeout=LIMIT)[1]
    finally:
        process.kill()
