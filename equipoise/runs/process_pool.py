"""The runs of a sweep, one after the other or several at a time, each in a process that serves many."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from equipoise.callbacks.base import RunCallback
from equipoise.config.experiment import Experiment
from equipoise.errors import Interrupted, RunFailed
from equipoise.runs.launch import clear_if_half_scored, has_models, run
from equipoise.runs.sweep import FAILED, SweepRun, chains
from equipoise.storage import atomic_files

Notes = list[str]
"""What a person should know of a run."""
Told = Callable[[SweepRun, Notes], None]
Chain = tuple[list[SweepRun], Path | None]
"""Runs with the same training that are left to do, and the folder of one that is done, if there is one."""
_stopping = threading.Event()
"""In a worker: begin nothing more."""


class _Listener(RunCallback):
    def __init__(self) -> None:
        self.texts: Notes = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


def work(experiment: Experiment, folder: Path, data: Path | None, trained: Path | None = None) -> Notes:
    """One run, from its start, from where it was, or from what another trained; one that comes to nothing leaves a file
    that says why."""
    listener = _Listener()
    try:
        clear_if_half_scored(folder)
        begun = (folder / "run.toml").exists()
        run(experiment, folder, data, begun, listener, None if begun else trained)
    except RunFailed as error:
        listener.on_message(f"failed: {error}")
        atomic_files.write_json(folder / FAILED, {"why": str(error)})
    return [f"{folder.name}: {text}" for text in listener.texts]


def execute(wanted: Sequence[SweepRun], out: Path, data: Path | None, jobs: int, told: Told) -> None:
    """Run those that are not done yet; `told` hears of each that ends."""
    left: list[Chain] = []
    for alike in chains(wanted):
        todo = [cell for cell in alike if not cell.done(out) and not cell.failed(out)]
        trained = next((cell.folder(out) for cell in alike if cell.done(out) and has_models(cell.folder(out))), None)
        if todo:
            left.append((todo, trained))
    if jobs == 1:
        for chain in left:
            rest: Chain | None = chain
            while rest is not None:
                (cell, *_), trained = rest
                told(cell, work(cell.experiment, cell.folder(out), data, trained))
                rest = _after(rest, out, told)
    elif left:
        _in_processes(left, out, data, jobs, told)


def _after(chain: Chain, out: Path, told: Told) -> Chain | None:
    """What is left of a chain when its first run has ended; where the training came to nothing, it does so for all."""
    (cell, *rest), trained = chain
    if trained is None and cell.failed(out):
        why = (cell.folder(out) / FAILED).read_text()
        for other in rest:
            atomic_files.make_folder(other.folder(out))
            atomic_files.write_text(other.folder(out) / FAILED, why)
            told(other, [])
        return None
    return (rest, trained or (cell.folder(out) if cell.done(out) else None)) if rest else None


def _in_processes(left: Sequence[Chain], out: Path, data: Path | None, jobs: int, told: Told) -> None:
    context = get_context("spawn")
    pids = context.SimpleQueue()
    cores = max(1, len(os.sched_getaffinity(0)) // jobs)
    waiting: dict[Future[Notes | None], Chain] = {}
    todo = list(left)[::-1]
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(pids,))
    try:
        while True:
            while len(waiting) < jobs and todo:
                (cell, *_), trained = chain = todo.pop()
                engine = cell.experiment.engine
                workers = min(cores, engine.workers or cores)  # together they have what one run would have
                experiment = replace(cell.experiment, engine=engine.model_copy(update={"workers": workers}))
                with _deaf():
                    waiting[pool.submit(_work, experiment, cell.folder(out), data, trained)] = chain
            if not waiting:
                break
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                chain, notes = waiting.pop(future), future.result()
                if notes is None:
                    raise Interrupted
                told(chain[0][0], notes)
                if (rest := _after(chain, out, told)) is not None:
                    todo.append(rest)
    except KeyboardInterrupt:
        while not pids.empty():  # workers do not hear Ctrl-C themselves: each is asked once, and saves what it has
            os.kill(pids.get(), signal.SIGINT)
        wait(waiting)
        raise Interrupted from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ctrl-C waits: a worker that is born meanwhile does not hear it before it can make something of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(pids: Any) -> None:
    """A worker begins: out of reach of the terminal's Ctrl-C, and gone when its parent is."""
    os.setpgrp()
    signal.signal(signal.SIGINT, lambda *_: _stopping.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    pids.put(os.getpid())
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(experiment: Experiment, folder: Path, data: Path | None, trained: Path | None) -> Notes | None:
    """None if it was broken off."""
    if _stopping.is_set():
        return None
    try:
        return work(experiment, folder, data, trained)
    except Interrupted:
        _stopping.set()
        return None
