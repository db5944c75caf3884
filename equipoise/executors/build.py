"""Selection of the executor of a run from its settings."""

import os
import shutil

from equipoise.algorithms.base import Algorithm
from equipoise.config.engine import Engine, Schedule
from equipoise.data.federation import Federation
from equipoise.distributed import environment
from equipoise.errors import EquipoiseError
from equipoise.executors.base import Executor
from equipoise.executors.stacked import StackedExecutor
from equipoise.executors.threaded import ThreadedExecutor
from equipoise.training.task import Task


def build_executor(
    engine: Engine, task: Task, federation: Federation, algorithm: Algorithm, schedule: Schedule
) -> Executor:
    """Build the executor that the engine settings select."""
    # Processes of a run on one machine share its cores.
    workers = engine.workers or max(1, len(os.sched_getaffinity(0)) // environment.local_world_size())
    if execution_mode(engine, task) == "stacked":
        return StackedExecutor(task, federation, algorithm, schedule, workers, engine.compile)
    return ThreadedExecutor(task, federation, algorithm, schedule, workers)


def execution_mode(engine: Engine, task: Task) -> str:
    """Return the execution mode, with `auto` resolved; raise an error for settings that this mode would ignore."""
    mode = task.mode() if engine.mode == "auto" else engine.mode
    if engine.compile and mode != "stacked":
        raise EquipoiseError("engine.compile = true works with engine.mode = 'stacked' only; this run uses threads")
    if engine.compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise EquipoiseError("engine.compile = true needs a C++ compiler, and none was found; leave it out")
    return mode
