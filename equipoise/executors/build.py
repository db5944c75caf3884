"""Selection of the executor of a run from its settings."""

import os
import shutil

from equipoise.algorithms.base import Algorithm
from equipoise.config.engine import Engine, Schedule
from equipoise.data.federation import Federation
from equipoise.distributed import environment
from equipoise.distributed.shards import ClientShards
from equipoise.errors import EquipoiseError
from equipoise.executors.base import Executor
from equipoise.executors.compiled_step import why_not_compiled
from equipoise.executors.stacked import StackedExecutor
from equipoise.executors.threaded import ThreadedExecutor
from equipoise.torch_device import deterministic_kernels, is_accelerator
from equipoise.training.task import Task

_STACK_NUMBERS = 400_000  # in the batch of a stack, which stays in a core's cache from the gather to the step
_DEVICE_STACK_BYTES = 2 << 30  # in the tensors of a stack's step on an accelerator
_MOST_ON_DEVICE = 64
_FEWEST, _MOST = 5, 10  # clients: enough to spread the cost of a call, few enough to occupy several cores


def build_executor(
    engine: Engine, task: Task, federation: Federation, algorithm: Algorithm, schedule: Schedule
) -> Executor:
    """Build the executor that the engine settings select."""
    # Processes of a run on one machine share its cores.
    workers = engine.workers or max(1, len(os.sched_getaffinity(0)) // environment.local_world_size())
    if is_accelerator(task.device) and not engine.workers:  # it is busy with one; more only take turns
        workers = 1
    executor = _executor(engine, task, federation, algorithm, schedule, workers)
    executor.settings.enter_context(deterministic_kernels(task.device, engine.deterministic))
    return executor


def _executor(
    engine: Engine, task: Task, federation: Federation, algorithm: Algorithm, schedule: Schedule, workers: int
) -> Executor:
    training, unseen = map(len, federation.by_name)
    federation = federation.placed(task.device, engine.data)
    if execution_mode(engine, task) == "stacked":
        on_device = is_accelerator(task.device)
        size = device_stack_size(task, algorithm) if on_device else stack_size(federation, algorithm)
        few = isinstance(schedule.participation, int) and schedule.participation > training  # newcomers after training
        shards = ClientShards.of_stacks(training, unseen, training if few else schedule.cohort(training), size)
        # Shards have `size` to twice as many clients of a full cohort, so most are one stack.
        return StackedExecutor(task, federation, algorithm, schedule, workers, shards, 2 * size, engine.compile)
    shards = ClientShards(training, unseen)
    return ThreadedExecutor(task, federation, algorithm, schedule, workers, shards, compiled=engine.compile)


def stack_size(federation: Federation, algorithm: Algorithm) -> int:
    """Return the least number of clients to stack: few if batches are large, more if they are small.

    The last digits of results depend on it, so it is a rule about the run, and not about the machine.
    """
    batch = min(algorithm.batch, int(federation.train.lengths.max()))
    numbers = max(1, batch * federation.x[0].numel())
    return min(max(_STACK_NUMBERS // numbers, _FEWEST), _MOST)


def device_stack_size(task: Task, algorithm: Algorithm) -> int:
    """Return the least number of clients to stack on an accelerator, where a call should have much to do."""
    return min(max(_DEVICE_STACK_BYTES // max(1, task.step_bytes(algorithm.batch)), 1), _MOST_ON_DEVICE)


def execution_mode(engine: Engine, task: Task) -> str:
    """Return the execution mode, with `auto` resolved; raise an error for settings that this mode would ignore."""
    mode = task.mode() if engine.mode == "auto" else engine.mode
    if engine.compile and mode != "stacked" and (why := why_not_compiled(task)) is not None:
        raise EquipoiseError(f"engine.compile = true is not possible: {why}; leave it out")
    if engine.compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise EquipoiseError("engine.compile = true needs a C++ compiler, and none was found; leave it out")
    return mode
