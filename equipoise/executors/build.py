"""Selection of the executor of a run from its settings."""

import os
import shutil

from equipoise.algorithms.base import Algorithm
from equipoise.config.engine import Engine, Schedule
from equipoise.data.federation import Federation
from equipoise.distributed.shards import Shards
from equipoise.errors import EquipoiseError
from equipoise.executors.base import Executor
from equipoise.executors.stacked import StackedExecutor
from equipoise.executors.threaded import ThreadedExecutor
from equipoise.training.task import Task

_STACK_NUMBERS = 400_000  # in the batch of a stack, which stays in a core's cache from the gather to the step
_FEWEST, _MOST = 5, 10  # clients: enough to spread the cost of a call, few enough to occupy several cores


def build_executor(
    engine: Engine, task: Task, federation: Federation, algorithm: Algorithm, schedule: Schedule
) -> Executor:
    """Build the executor that the engine settings select."""
    workers = engine.workers or len(os.sched_getaffinity(0))
    if execution_mode(engine, task) == "stacked":
        size = stack_size(federation, algorithm)
        clients = len(federation.by_name[0])
        few = isinstance(schedule.participation, int) and schedule.participation > clients  # newcomers after training
        shards = Shards.of_stacks(len(federation), clients if few else schedule.cohort(clients), size)
        # Shards have `size` to twice as many clients of a full cohort, so most are one stack.
        return StackedExecutor(task, federation, algorithm, schedule, workers, shards, 2 * size, engine.compile)
    return ThreadedExecutor(task, federation, algorithm, schedule, workers, Shards(len(federation)))


def stack_size(federation: Federation, algorithm: Algorithm) -> int:
    """Return the least number of clients to stack: few if batches are large, more if they are small.

    The last digits of results depend on it, so it is a rule about the run, and not about the machine.
    """
    batch = min(algorithm.batch, int(federation.train.lengths.max()))
    numbers = max(1, batch * federation.x[0].numel())
    return min(max(_STACK_NUMBERS // numbers, _FEWEST), _MOST)


def execution_mode(engine: Engine, task: Task) -> str:
    """Return the execution mode, with `auto` resolved; raise an error for settings that this mode would ignore."""
    mode = task.mode() if engine.mode == "auto" else engine.mode
    if engine.compile and mode != "stacked":
        raise EquipoiseError("engine.compile = true works with engine.mode = 'stacked' only; this run uses threads")
    if engine.compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise EquipoiseError("engine.compile = true needs a C++ compiler, and none was found; leave it out")
    return mode
