"""Handling of Ctrl-C: the run stops at a safe point."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_on_interrupt(interrupted: threading.Event) -> Iterator[None]:
    """Set `interrupted` on Ctrl-C, so that the run can stop at a safe point; a second Ctrl-C stops it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def request_stop(number: int, frame: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, request_stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
