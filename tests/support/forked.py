"""Processes that may be killed: forked from one that has imported PyTorch already, as starting it takes seconds."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from equipoise.runs import process_pool
from tests.support.waiting import LIMIT

_CONTEXT = multiprocessing.get_context("forkserver")
# What stacked runs import late comes along.
_CONTEXT.set_forkserver_preload(
    ["tests.support.flower_memory", "tests.support.process_runs", "tests.support.forked_commands", "torch._dynamo"]
)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Let the worker processes of sweeps be forked, too; they get what they need as those that are started do."""
    with mock.patch.object(process_pool, "get_context", return_value=_CONTEXT):
        yield


class Forked:
    """A process that runs a function; it is killed with the `with` block at the latest."""

    def __init__(
        self, log: Path, work: Callable[..., None], *arguments: Any, environment: Mapping[str, str] | None = None
    ):
        """Start the process.

        Args:
            log: gets what it prints.
            work: the function, which must be at the top of a module.
            arguments: the function's arguments.
            environment: all environment variables of the process; this process's own if it is left out.
        """
        self.log = log
        given = dict(os.environ if environment is None else environment)
        self.process: BaseProcess = _CONTEXT.Process(target=_run, args=(log, given, work, arguments), daemon=True)
        self.process.start()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def wait(self) -> int:
        """Wait for its end; return its exit code, which is negative if a signal ended it."""
        self.process.join(LIMIT)
        assert self.process.exitcode is not None, f"it never ended: {self.said()}"
        return self.process.exitcode

    def said(self) -> str:
        """Return what it has printed, with the traceback if it failed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _run(log: Path, environment: dict[str, str], work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import torch

    # As tests/conftest.py does: a process that is killed loses nothing that it has written.
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None
    os.environ.clear()
    os.environ.update(environment)
    with log.open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    try:
        work(*arguments)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
