"""Functions that assemble a run from its parts: the initial model, the task, and the run folder."""

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from equipoise import randomness
from equipoise.algorithms.base import Algorithm
from equipoise.callbacks.base import Callback
from equipoise.callbacks.callback_list import CallbackList
from equipoise.config.engine import Engine
from equipoise.config.experiment import Experiment
from equipoise.data.federation import Federation
from equipoise.distributed import environment
from equipoise.distributed.ranks import Ranks
from equipoise.engine.run import Run
from equipoise.errors import EquipoiseError, first_line, sentence_of
from equipoise.metrics import MetricLike
from equipoise.models import MODELS
from equipoise.models.base import ModelSettings
from equipoise.parameter_space import Selection
from equipoise.storage.run_folder import RunFolder
from equipoise.torch_device import CPU, choose_device, deterministic_kernels
from equipoise.training.task import Task, has_head

_TOO_LARGE = "the model does not fit into the memory of this machine"
LossLike = str | Callable[[Tensor, Tensor], Tensor]
AnyRun = TypeVar("AnyRun", bound=Run)


def initial_module(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the initial model, with parameters that depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.key(seed, "model") % 2**63)
        return build()


def build_task(
    module: nn.Module,
    samples: Federation | tuple[Tensor, Tensor],
    engine: Engine,
    *,
    head: Selection | None = "head",
    loss: LossLike | None = None,
    metric: MetricLike | Sequence[MetricLike] | None = None,
    device: torch.device = CPU,
) -> Task:
    """Build the task of training `module`.

    Args:
        module: the model.
        samples: a federation, or a few samples (x, y), which show what inputs and targets look like.
        engine: the engine settings, which determine the number format.
        head: name of the submodule that is the head, or any parameters, selected as in `ParameterSpace.mask`.
        loss: by default cross-entropy for labels and squared error for numbers.
        metric: a metric or several; by default the one that belongs to the loss.
        device: where the model is trained.
    """
    dtype = engine.dtype
    if isinstance(samples, Federation):
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in samples.sample())
        samples = x, y
    loss = loss or ("squared" if samples[1].is_floating_point() else "cross-entropy")
    with deterministic_kernels(device, engine.deterministic):
        return Task(
            module, samples, head=head, loss=loss, metric=metric, dtype=dtype, mixed=engine.mixed, device=device
        )


def engine_device(engine: Engine) -> torch.device:
    """Return the device that the engine settings select; processes of a run on one machine take turns."""
    return choose_device(engine.device, engine.dtype, environment.local_rank())


def check_head(module: nn.Module, head: Selection | None, algorithm: Algorithm) -> None:
    """Raise an error if the algorithm needs a head, none is named, and the model has none under the usual name."""
    if algorithm.requires.head and head == "head" and not has_head(module):
        raise EquipoiseError(
            f"{type(algorithm).__name__} needs to know the model's head; name the submodule that is the head, "
            "or say head = [] if there is to be none"
        )


def experiment_module(experiment: Experiment, shape: Sequence[int], outputs: int) -> nn.Module:
    """Build the model that the section [model] names."""
    if experiment.model is None:
        raise EquipoiseError("the section [model] is missing; name a model there, or give one in app.py")
    settings = experiment.model
    check_model_size(settings, shape, outputs)
    try:
        return initial_module(lambda: settings.build(tuple(shape), outputs), experiment.schedule.seed)
    except (MemoryError, RuntimeError) as error:  # torch has no class of its own for it
        if sentence_of(error) is None:
            raise
        raise EquipoiseError(f"{_TOO_LARGE} ({first_line(error)}); make [model] smaller") from None


def check_model_size(settings: ModelSettings, shape: Sequence[int], outputs: int) -> None:
    """Raise an error if a model of the library needs more memory than the machine has, before it is built.

    Args:
        settings: the settings of the model.
        shape: shape of one input.
        outputs: number of outputs.
    """
    if type(settings) not in MODELS.values():  # code of the user's own may do more than build layers
        return
    try:
        with torch.device("meta"):
            planned = settings.build(tuple(shape), outputs)
    except EquipoiseError:
        raise
    except Exception as error:  # such as sizes whose product is beyond all numbers
        raise EquipoiseError(f"the model cannot be built ({first_line(error)}); make [model] smaller") from None
    size = sum(t.numel() * t.element_size() for t in planned.state_dict().values())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > there:
        raise EquipoiseError(
            f"{_TOO_LARGE}: its parameters take {size / 2**30:,.0f} GB, and there are {there / 2**30:,.0f} GB; make "
            "[model] smaller"
        )


def experiment_task(experiment: Experiment, federation: Federation, device: torch.device | None = None) -> Task:
    """Build the task of an experiment whose data are all on this machine; by default on the device of its engine."""
    schedule = experiment.schedule
    outputs = federation.outputs * schedule.outputs_per_number
    module = experiment_module(experiment, federation.sample()[0].shape[1:], outputs)
    check_head(module, experiment.head, experiment.algorithm)
    engine = experiment.engine
    return build_task(
        module,
        federation,
        engine,
        head=experiment.head,
        loss=schedule.pinball or schedule.loss,
        metric=schedule.metrics,
        device=engine_device(engine) if device is None else device,
    )


def run_in_folder(
    build: Callable[[RunFolder, CallbackList], AnyRun],
    execute: Callable[[AnyRun], None],
    out: Path,
    tables: Mapping[str, Any],
    *,
    resume: bool,
    callbacks: Sequence[Callback],
    ranks: Ranks | None = None,
    **written: Any,
) -> AnyRun:
    """Run in a locked run folder.

    Args:
        build: makes the run, given its folder and its callbacks.
        execute: runs it.
        out: the run folder.
        tables: all settings, for run.toml.
        resume: whether the folder may already hold a run with the same settings, which is then resumed.
        callbacks: receive the events of the run; in processes other than the first, only those that affect results.
        ranks: the processes of the run; the first one writes the folder, and all must see it.
        **written: more facts for the section [written] of run.toml.
    """
    ranks = ranks or Ranks()
    ranks.check_equal("settings", json.dumps(tables, sort_keys=True, default=str))
    if not ranks.leader:
        called = CallbackList([callback for callback in callbacks if callback.affects_results], tables)
        with called.watching():
            return _run_beside_leader(build, execute, out, called, ranks)
    called = CallbackList(callbacks, tables)
    with RunFolder.at_work(out, dict(tables), resume, **written) as folder, called.watching():
        ranks.barrier()
        run = build(folder, called)
        execute(run)
    return run


def _run_beside_leader(
    build: Callable[[RunFolder, CallbackList], AnyRun],
    execute: Callable[[AnyRun], None],
    out: Path,
    callbacks: CallbackList,
    ranks: Ranks,
) -> AnyRun:
    """Run in a process that does not write the run folder, once the first process has locked it."""
    ranks.barrier()
    folder = RunFolder(out)
    if not folder.config.exists():
        raise EquipoiseError(
            f"process {ranks.rank} on {socket.gethostname()} does not see the run folder {out}; processes on several "
            "machines need a folder that all of them share"
        )
    run = build(folder, callbacks)
    execute(run)
    return run


def check_back(back: Any, resume: bool) -> None:
    """Raise an error unless a run can go back by so many checkpoints."""
    if not isinstance(back, int) or isinstance(back, bool) or back < 0:
        raise EquipoiseError(
            f"back = {back!r} is not allowed; it is the number of checkpoints to go back, 0 for the newest one"
        )
    if back and not resume:
        raise EquipoiseError(f"--back {back} goes back in a run that is resumed; add --resume (resume=True in Python)")


def start_or_resume(run: Run, resume: bool, back: int = 0) -> None:
    """Run all rounds or, with `resume`, those that are left after a checkpoint.

    Args:
        run: the run.
        resume: whether to continue from a checkpoint.
        back: 0 for the newest checkpoint, N for the Nth before it.
    """
    if resume:
        # When torchrun starts all processes again, the run has gone back already.
        run.resume(back if environment.restarts() == 0 else 0)
    run.run()
