"""The Python interface: `train` takes any module and any clients' data."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.attacks import ATTACKS, Attack
from equipoise.callbacks import CALLBACKS, Callback, Progress, with_trackers
from equipoise.callbacks.callback_list import CallbackList
from equipoise.callbacks.messages import WarnMessages
from equipoise.callbacks.progress import progress_from_python
from equipoise.config.device_classes import Devices
from equipoise.config.engine import Engine, Schedule
from equipoise.config.experiment import callback_tables
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import SPLIT, Federation, from_clients
from equipoise.data.finite import check_finite
from equipoise.distributed.environment import restarts
from equipoise.distributed.ranks import current_ranks
from equipoise.engine.assembly import (
    build_task,
    check_back,
    check_head,
    engine_device,
    run_in_folder,
    start_or_resume,
)
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.executors.build import execution_mode
from equipoise.metrics import MetricLike
from equipoise.parameter_space import Selection
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import REDUCERS, Reducer
from equipoise.registry import choose, function_name, name_of
from equipoise.runs.arguments import as_algorithm, as_folder, as_values, check_instance, check_module
from equipoise.runs.result import Result
from equipoise.settings import read
from equipoise.storage.run_folder import PROBLEM, RunFolder
from equipoise.torch_device import forked_random


def train(
    module: nn.Module,
    clients: Sequence[Any] | Mapping[Any, Any] | Federation,
    algorithm: Algorithm | str,
    *,
    head: Selection | None = "head",
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross-entropy",
    metric: MetricLike | Sequence[MetricLike] | None = None,
    names: Sequence[str] | None = None,
    split: Sequence[float] = SPLIT,
    unseen: float = 0.0,
    seed: int = 0,
    rounds: int = 50,
    participation: float | int = 1.0,
    attack: Attack | str | None = None,
    reducer: Reducer | str = "weighted-mean",
    privacy: Privacy | None = None,
    devices: Devices | None = None,
    evaluate_every: int = 1,
    checkpoint_every: int = 10,
    keep_checkpoints: int = 3,
    select: str = "validation",
    targets: Sequence[float] = (),
    mode: str = "auto",
    workers: int = 0,
    precision: str = "float32",
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    back: int = 0,
    track: Sequence[str] = (),
    callbacks: Sequence[Callback | str] = (),
    progress: bool | None = None,
) -> Result:
    """Train a federation, and return every client's model.

    Args:
        module: any nn.Module; it is copied.
        clients: a list, or a dictionary by name, with one entry per client: a pair (x, y), a Dataset, or a dictionary
            of train, validation and test. Or a `Federation`, such as `load_data` returns.
        algorithm: an algorithm with its settings, such as `eq.Ditto(lam=0.1, lr=0.05)`, or a name, such as "ditto".
        head: what methods such as FedPer and FedRep keep on the client: the name of a submodule, a pattern of names
            such as "*.lora_B.*", a class of layers, or a list of these; None if there is to be no head.
        loss: "cross-entropy", "squared", "pinball", a `Pinball` with quantiles, or a function (output, target).
        metric: a metric or several, each a name, a `Metric` or a function (outputs, targets) that returns a number.
            The first decides what is better; by default it is the one that belongs to the loss.
        names: names of the clients, where they come as a list.
        split: train, validation and test fractions of clients that come undivided.
        unseen: fraction of the clients that is kept out of training, adapts the result and is scored separately.
        seed: seed of all randomness.
        rounds: number of rounds.
        participation: clients per round, as a fraction or as a number.
        attack: makes some clients malicious; a name, or an attack with settings, such as `eq.SignFlip(fraction=0.5)`.
        reducer: how the server averages; a name, or a reducer with settings.
        privacy: clips uploads and adds noise, such as `eq.Privacy(clip=1.0, target_epsilon=8.0)`.
        devices: classes of clients by the iterations of equilibrium layers that they can afford.
        evaluate_every: rounds between two evaluations.
        checkpoint_every: rounds between two checkpoints.
        keep_checkpoints: number of checkpoints that are kept.
        select: samples on which the hybrid model is chosen, "validation" or "test".
        targets: scores; the summary reports the first round that reached each.
        mode: "auto", "threads" or "stacked".
        workers: number of threads; 0 for all cores.
        precision: "float32", "float64" or "bf16-mixed".
        device: where to train, such as "cpu", "cuda" or "mps"; "auto" takes an accelerator if there is one. Models of
            the result are on the CPU.
        out: folder to write the run to, with all models at the end, so that `load_result` loads it.
        resume: continue the run in that folder.
        back: with `resume`, 0 to continue from the newest checkpoint, N from the Nth before it.
        track: trackers that log the rounds, "tensorboard", "mlflow" or "wandb"; needs `out`.
        callbacks: are called during the run, such as `eq.EarlyStopping(patience=10)`, `"best-model"` or your own.
        progress: whether to show progress; None does so in terminals and notebooks.

    Returns:
        The result: models as ordinary modules, and metrics.
    """
    check_module(module)
    algorithm = as_algorithm(algorithm)
    folder = as_folder(out)
    if resume and folder is None:
        raise EquipoiseError("resume=True continues the run in a folder; say which with out=...")
    check_back(back, resume)
    schedule = read(
        Schedule,
        {
            "seed": seed,
            "rounds": rounds,
            "participation": participation,
            "evaluate_every": evaluate_every,
            "checkpoint_every": checkpoint_every,
            "keep_checkpoints": keep_checkpoints,
            "select": select,
            "targets": as_values("targets", targets) or None,
            "track": as_values("track", track),
        },
        "",
    )
    if isinstance(attack, str):
        attack = choose(ATTACKS, {"attack": attack}, "train", "attack")[1]
    if isinstance(reducer, str):
        reducer = choose(REDUCERS, {"reducer": reducer}, "train", "reducer")[1]
    check_instance("attack", attack, Attack, "equipoise.SignFlip(fraction=0.2), or a name")
    check_instance("reducer", reducer, Reducer, "equipoise.TrimmedMean(), or a name", optional=False)
    check_instance("privacy", privacy, Privacy, "equipoise.Privacy(clip=1.0, target_epsilon=8.0)")
    check_instance("devices", devices, Devices, "equipoise.Devices(iterations=(20, 10))")
    uploads = UploadSettings(attack, reducer, privacy)
    engine = read(Engine, {"mode": mode, "workers": workers, "precision": precision, "device": str(device)}, "")
    check_head(module, head, algorithm)
    federation = (
        clients if isinstance(clients, Federation) else from_clients(clients, names=names, split=split, seed=seed)
    )
    check_finite(federation)
    if not isinstance(unseen, (int, float)) or not 0 <= unseen < 1:
        raise EquipoiseError(f"unseen = {unseen!r} is not allowed; it must be a number >= 0 and < 1")
    federation = federation.holding_out(unseen, seed)
    task = build_task(module, federation, engine, head=head, loss=loss, metric=metric, device=engine_device(engine))
    ranks = current_ranks()
    if track and folder is None:
        raise EquipoiseError(f"track = {list(track)} needs a run folder; say out=...")

    def build(folder: RunFolder | None, callbacks: CallbackList) -> Simulation:
        return Simulation(task, federation, algorithm, schedule, engine, folder, callbacks, uploads, devices, ranks)

    def execute(simulation: Simulation) -> None:
        with forked_random(task.device):  # a module that draws from torch's own stream leaves the caller's alone
            start_or_resume(simulation, resume, back)
            if folder is not None and ranks.leader:
                Result(simulation).save(folder)

    if isinstance(callbacks, (Callback, str)):
        raise EquipoiseError("callbacks is one callback; give a list, such as callbacks=[eq.EarlyStopping()]")
    chosen = [_callback(given) for given in callbacks]
    recorded = [callback for callback in chosen if callback.affects_results]

    def settings() -> dict[str, Any]:
        return {
            **schedule.table(),
            "algorithm": {"name": name_of(ALGORITHMS, algorithm), **algorithm.table()},
            **({"attack": {"name": name_of(ATTACKS, attack), **attack.table()}} if attack else {}),
            "reducer": {"name": name_of(REDUCERS, uploads.reducer), **uploads.reducer.table()},
            **({"privacy": privacy.table()} if privacy else {}),
            **({"devices": devices.table()} if devices else {}),
            **callback_tables([name_of(CALLBACKS, callback) for callback in recorded], recorded),
            "task": {
                "loss": loss if isinstance(loss, str) else function_name(loss),
                **({"quantiles": list(task.loss.pinball.quantiles)} if task.loss.pinball else {}),
                "metrics": [metric.name for metric in task.metrics.metrics],
            },
            "model": {"parameters": task.space.size, "layout": task.space.fingerprint()},
            "data": {"clients": len(federation), "unseen": unseen, "samples": federation.fingerprint()},
            "engine": engine.table(),
        }

    shown = [] if any(isinstance(callback, Progress) for callback in chosen) else progress_from_python(progress)
    called = with_trackers([WarnMessages(), *shown, *chosen], schedule.track if ranks.leader else ())
    if folder is None:
        without_folder = CallbackList(called, settings())
        with without_folder.watching():
            simulation = build(None, without_folder)
            execute(simulation)
        return Result(simulation, settings)
    written: dict[str, Any] = {
        "mode": execution_mode(engine, task),
        "device": str(task.device),
        PROBLEM: federation.problem(),
    }
    resume = resume or restarts() > 0
    run = run_in_folder(build, execute, folder, settings(), resume=resume, callbacks=called, ranks=ranks, **written)
    return Result(run)


def _callback(given: Any) -> Callback:
    """Return a callback that was given as such or by name."""
    if isinstance(given, str):
        return choose(CALLBACKS, {"callbacks": given}, "train", "callbacks")[1]
    if not isinstance(given, Callback):
        hint = f"; say {given.__name__}()" if isinstance(given, type) and issubclass(given, Callback) else ""
        raise EquipoiseError(
            f"callbacks has {given!r}, which is not a callback{hint or '; it must derive from equipoise.Callback'}"
        )
    return given
