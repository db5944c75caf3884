"""Execution of the runs of a sweep: one after the other, or several at a time in worker processes."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

from equipoise.callbacks.base import Callback
from equipoise.config.experiment import Experiment
from equipoise.distributed.environment import exit_with_parent
from equipoise.errors import Interrupted, RunFailed
from equipoise.runs.launch import clear_if_half_scored, has_models, run
from equipoise.runs.sweep import SweepRun, chains
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import FAILED

Notes = list[str]
"""Messages about a run, for the user."""
Told = Callable[[SweepRun, Notes], None]
"""Is called with each run that ends, and its messages."""
Chain = tuple[list[SweepRun], Path | None]
"""Runs with the same training that are still to do, and the folder of a finished one, if there is one."""
_WAIT = 0.05  # seconds between two looks for workers that have started, after Ctrl-C
_stopping = threading.Event()
"""In a worker: start no further run."""


def unsaid(notes: Notes, said: set[str]) -> Notes:
    """Return the notes of a run without warnings that other runs had already; failures are always among them.

    Args:
        notes: the messages, each after the name of the run's folder.
        said: the texts of earlier messages; those of these notes are added.
    """
    found = []
    for note in notes:
        text = note.partition(": ")[2]
        if text not in said or text.startswith("failed:"):
            found.append(note)
            said.add(text)
    return found


class _MessageCollector(Callback):
    affects_results: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.texts: Notes = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


def work(experiment: Experiment, folder: Path, data: Path | None, trained: Path | None = None) -> Notes:
    """Do one run; if it fails, write the reason into its folder.

    Args:
        experiment: what to run.
        folder: the run folder; an unfinished run in it is resumed.
        data: the folder of data sets, or None for the default.
        trained: folder of a finished run with the same training, whose models are scored in place of training.

    Returns:
        The messages of the run.
    """
    collector = _MessageCollector()
    try:
        clear_if_half_scored(folder)
        begun = (folder / "run.toml").exists()
        run(experiment, folder, data, begun, [collector], None if begun else trained)
    except RunFailed as error:
        collector.on_message(f"failed: {error}")
        atomic_files.write_json(folder / FAILED, {"why": str(error)})
    return [f"{folder.name}: {text}" for text in collector.texts]


def execute(wanted: Sequence[SweepRun], out: Path, data: Path | None, jobs: int, report: Told) -> None:
    """Do all runs that are not done yet.

    Args:
        wanted: the runs.
        out: the folder of all run folders.
        data: the folder of data sets, or None for the default.
        jobs: number of runs at a time; 1 runs them in this process.
        report: is called with each run that ends.
    """
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
                report(cell, work(cell.experiment, cell.folder(out), data, trained))
                rest = _remaining(rest, out, report)
    elif left:
        _in_processes(left, out, data, jobs, report)


def _remaining(chain: Chain, out: Path, report: Told) -> Chain | None:
    """Return what is left of a chain after its first run; if the training failed, mark all its runs as failed."""
    (cell, *rest), trained = chain
    if trained is None and cell.failed(out):
        why = (cell.folder(out) / FAILED).read_text()
        for other in rest:
            atomic_files.make_folder(other.folder(out))
            atomic_files.write_text(other.folder(out) / FAILED, why)
            report(other, [])
        return None
    return (rest, trained or (cell.folder(out) if cell.done(out) else None)) if rest else None


def _in_processes(left: Sequence[Chain], out: Path, data: Path | None, jobs: int, report: Told) -> None:
    context = get_context("spawn")
    pids = context.SimpleQueue()
    cores = max(1, len(os.sched_getaffinity(0)) // jobs)
    waiting: dict[Future[Notes | None], Chain] = {}
    todo = list(left)[::-1]
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_init_worker, initargs=(pids,))
    try:
        while True:
            while len(waiting) < jobs and todo:
                (cell, *_), trained = chain = todo.pop()
                engine = cell.experiment.engine
                workers = min(cores, engine.workers or cores)  # together they use as many cores as one run would
                experiment = replace(cell.experiment, engine=engine.model_copy(update={"workers": workers}))
                with _blocked_sigint():
                    # Sent as tables, because a worker has not imported the user's own code.
                    sent = (experiment.tables(), experiment.folders, cell.folder(out), data, trained)
                    waiting[pool.submit(_work, *sent)] = chain
            if not waiting:
                break
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                chain, notes = waiting.pop(future), future.result()
                if notes is None:
                    raise Interrupted
                report(chain[0][0], notes)
                if (rest := _remaining(chain, out, report)) is not None:
                    todo.append(rest)
    except KeyboardInterrupt:
        # Ctrl-C does not reach the workers: each is signalled once, so that it saves its state. One that is still
        # starting names itself only when it can handle the signal.
        while wait(waiting, timeout=_WAIT).not_done:
            while not pids.empty():
                os.kill(pids.get(), signal.SIGINT)
        raise Interrupted from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _blocked_sigint() -> Iterator[None]:
    """Delay Ctrl-C, so that a worker that starts meanwhile receives it only once it can handle it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker(pids: Any) -> None:
    """Shield a new worker from the terminal's Ctrl-C, and let it exit when its parent does."""
    os.setpgrp()
    signal.signal(signal.SIGINT, _start_no_further_run)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    pids.put(os.getpid())
    exit_with_parent()


def _start_no_further_run(*_: object) -> None:
    _stopping.set()


def _work(
    tables: dict[str, Any], folders: tuple[Path, ...], folder: Path, data: Path | None, trained: Path | None
) -> Notes | None:
    """Do one run; return its messages, or None if it was interrupted."""
    # Until the simulation handles Ctrl-C itself, while it reads the data, there is nothing to save.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return None if _stopping.is_set() else work(Experiment.parse(tables, folders=folders), folder, data, trained)
    except (Interrupted, KeyboardInterrupt):
        _stopping.set()
        return None
    finally:
        signal.signal(signal.SIGINT, _start_no_further_run)
