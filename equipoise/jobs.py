"""The runs of a sweep, one after the other or several at a time, each in a process that serves many."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from equipoise import files
from equipoise.config import Experiment
from equipoise.errors import Interrupted, RunFailed
from equipoise.runs import has_models, rescore, run
from equipoise.sweep import FAILED, Cell, chains
from equipoise.watcher import Watcher

Notes = list[str]
"""What a person should know of a run."""
Told = Callable[[Cell, Notes], None]
_stopping = threading.Event()
"""In a worker: begin nothing more."""


class _Listener(Watcher):
    def __init__(self) -> None:
        self.texts: Notes = []

    def tell(self, text: str) -> None:
        self.texts.append(text)


def work(experiment: Experiment, folder: Path, data: Path | None, trained: Path | None = None) -> Notes:
    """One run, from its start, from where it was, or from what another trained; one that comes to nothing leaves a file
    that says why."""
    listener = _Listener()
    try:
        if trained is not None:
            rescore(experiment, folder, data, trained, listener)
        else:
            run(experiment, folder, data, resume=(folder / "run.toml").exists(), watcher=listener)
    except RunFailed as error:
        listener.tell(f"failed: {error}")
        files.write_json(folder / FAILED, {"why": str(error)})
    return [f"{folder.name}: {text}" for text in listener.texts]


def execute(wanted: Sequence[Cell], out: Path, data: Path | None, jobs: int, told: Told) -> None:
    """Run those that are not done yet; `told` hears of each that ends."""
    left = []
    for chain in chains(wanted):
        todo = [cell for cell in chain if not cell.done(out) and not cell.failed(out)]
        trained = next((cell.folder(out) for cell in chain if cell.done(out) and has_models(cell.folder(out))), None)
        if todo:
            left.append((todo, trained))
    if jobs == 1:
        for todo, trained in left:
            for cell in todo:
                told(cell, work(cell.experiment, cell.folder(out), data, trained))
                trained = trained or (cell.folder(out) if cell.done(out) else None)
    elif left:
        _in_processes(left, out, data, jobs, told)


Chain = tuple[list[Cell], Path | None]
"""Runs with the same training that are left to do, and the folder of one that is done, if there is one."""


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
                waiting[pool.submit(_work, experiment, cell.folder(out), data, trained)] = chain
            if not waiting:
                break
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                ((cell, *rest), trained), notes = waiting.pop(future), future.result()
                if notes is None:
                    raise Interrupted
                told(cell, notes)
                if rest:
                    todo.append((rest, trained or (cell.folder(out) if cell.done(out) else None)))
    except KeyboardInterrupt:
        while not pids.empty():  # workers do not hear Ctrl-C themselves: each is asked once, and saves what it has
            os.kill(pids.get(), signal.SIGINT)
        wait(waiting)
        raise Interrupted from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(pids: Any) -> None:
    """A worker begins: out of reach of the terminal's Ctrl-C, and gone when its parent is."""
    os.setpgrp()
    signal.signal(signal.SIGINT, lambda *_: _stopping.set())
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
