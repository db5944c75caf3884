"""Selection of the executor of a run from its settings."""

import os
import shutil

from equipoise.algorithms.base import Algorithm
from equipoise.config.engine import Engine, Schedule
from equipoise.data.federation import Federation
from equipoise.errors import EquipoiseError
from equipoise.executors.base import Executor
from equipoise.executors.compiled_step import why_not_compiled
from equipoise.executors.stacked import StackedExecutor
from equipoise.executors.threaded import ThreadedExecutor
from equipoise.training.task import Task


def build_executor(
    engine: Engine, task: Task, federation: Federation, algorithm: Algorithm, schedule: Schedule
) -> Executor:
    """Build the executor that the engine settings select."""
    workers = engine.workers or len(os.sched_getaffinity(0))
    if execution_mode(engine, task) == "stacked":
        return StackedExecutor(task, federation, algorithm, schedule, workers, engine.compile)
    return ThreadedExecutor(task, federation, algorithm, schedule, workers, compiled=engine.compile)


def execution_mode(engine: Engine, task: Task) -> str:
    """Return the execution mode, with `auto` resolved; raise an error for settings that this mode would ignore."""
    mode = task.mode() if engine.mode == "auto" else engine.mode
    if engine.compile and mode != "stacked" and (why := why_not_compiled(task)) is not None:
        raise EquipoiseError(f"engine.compile = true is not possible: {why}; leave it out")
    if engine.compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise EquipoiseError("engine.compile = true needs a C++ compiler, and none was found; leave it out")
    return mode
