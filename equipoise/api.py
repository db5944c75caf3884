"""The Python interface: any module, any clients' data, one call."""

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.attacks import ATTACKS, Attack
from equipoise.callbacks.base import Watcher
from equipoise.callbacks.trackers import followed
from equipoise.config.device_classes import Devices
from equipoise.config.engine import DTYPES, Engine, Schedule
from equipoise.data.federation import SPLIT, Federation, from_clients
from equipoise.engine.aggregation_pipeline import Between
from equipoise.engine.executors.base import BUFFERS, Kind, Model
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.evaluation.scoreboard import HYBRIDS
from equipoise.losses import Metric
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import REDUCERS, Reducer
from equipoise.settings import choose, name_of, read
from equipoise.storage.run_folder import RunFolder
from equipoise.training.task import Task


class Result:
    """What a run came to: models as ordinary modules, and the metrics."""

    def __init__(self, simulation: Simulation):
        self._run = simulation

    @property
    def simulation(self) -> Simulation:
        """The run itself, as it stands."""
        return self._run

    @property
    def clients(self) -> tuple[str, ...]:
        return self._run.federation.names

    @property
    def federation(self) -> Federation:
        return self._run.federation

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dictionary a round, as in metrics.jsonl."""
        return copy.deepcopy(self._run.lines)

    @property
    def summary(self) -> dict[str, Any]:
        return self._run.summary()

    @property
    def looks_up(self) -> bool:
        """Do personal models look into the clients' samples when they predict?"""
        return self._run.algorithm.looks_up

    def scores(self) -> dict[str, np.ndarray]:
        """For each kind of model a row a client: loss and metric on validation, loss and metric on test."""
        return {kind: table.copy() for kind, table in self._run.scores.tables().items()}

    def _who(self, client: int | str) -> int:
        names = self._run.federation.names
        if isinstance(client, str) and client in names:
            return names.index(client)
        if isinstance(client, int) and 0 <= client < len(names):
            return client
        raise EquipoiseError(
            f"there is no client {client!r}; clients are 0 to {len(names) - 1}, or by name, such as {names[0]!r}"
        )

    def _is_unseen(self, client: int | str) -> bool:
        return self._run.federation.names[self._who(client)] in self._run.federation.unseen

    def personal_vector(self, client: int | str) -> Model:
        run = self._run
        who = self._who(client)
        executor = run.engine.executor(run.task, run.federation, run.algorithm, run.schedule.seed)
        try:
            kind: Kind = "unseen" if self._is_unseen(who) else "personal"
            model, _ = next(iter(executor.models(run.done, [run.job(who)], kind)))
        finally:
            executor.close()
        if model is None:
            raise EquipoiseError(f"{type(run.algorithm).__name__} has no personal models; ask for the global one")
        return model

    def personal(self, client: int | str) -> nn.Module:
        """The client's own model (by number or name)."""
        model = self.personal_vector(client)
        module = self._run.task.to_module(model.vector, model.buffers)
        return self._run.executor.predictor(module, model.who) if model.looks_up else module

    def global_vector(self) -> Tensor:
        vector = self._run.algorithm.shared(self._run.server)
        if vector is None:
            raise EquipoiseError(f"{type(self._run.algorithm).__name__} has no global model; ask for a client's own")
        return vector

    def global_model(self, client: int | str | None = None) -> nn.Module:
        """The model that all clients share; where it has buffers (BatchNorm), with those of `client`."""
        if client is None and self._run.task.buffer_names:
            raise EquipoiseError("the model's buffers stay with the clients; say whose to use: global_model(client)")
        if client is not None and self._run.task.buffer_names and self._is_unseen(client):
            raise EquipoiseError(
                f"client {client!r} took no part in training and has no buffers (BatchNorm statistics) of its own; "
                "ask for its personal model"
            )
        buffers = None if client is None else self._run.store.get(self._who(client)).get(BUFFERS)
        return self._run.task.to_module(self.global_vector(), buffers)

    def hybrid(self, client: int | str) -> nn.Module:
        """The better of the client's own and the global model, by its validation samples (or what `select` says)."""
        board = self._run.scores.of(self._who(client)).board()
        if not board.tables().keys() & set(HYBRIDS.values()):
            raise EquipoiseError(
                "there is no hybrid model without a personal model, a global one and validation samples"
            )
        takes_global = board.takes_global()[self._who(client)]
        return self.global_model(client) if takes_global else self.personal(client)


def train(
    module: nn.Module,
    clients: Sequence[Any] | Federation,
    algorithm: Algorithm,
    *,
    head: str | Sequence[str] | None = "head",
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross-entropy",
    metric: str | Metric | None = None,
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
    select: str = "validation",
    targets: Sequence[float] = (),
    mode: str = "auto",
    workers: int = 0,
    dtype: str = "float32",
    out: str | Path | None = None,
    resume: bool = False,
    track: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> Result:
    """Train a federation of `clients` and return every client's model.

    `module` is any nn.Module, and `head` the name of the part that personal-head methods keep on the client.
    `clients` is a list with a pair (x, y), a Dataset or a dictionary of train, validation and test for each.
    `loss` is "cross-entropy", "squared" or a function (output, target). `unseen` is the part of the clients that is
    kept out of training, adapts the result to its own data and is scored apart. `attack` makes some clients malicious,
    `reducer` is how the server averages (each by name, or with its settings, such as eq.SignFlip(fraction=0.5));
    `privacy` clips and noises what clients send, such as eq.Privacy(clip=1.0, target_epsilon=8.0);
    `devices` are classes of clients by the iterations of equilibrium layers that they afford;
    `select` says on which samples the hybrid model is chosen; `targets` are scores whose first round the summary tells.
    With `out` the run is also written there, and with `resume` it goes on from where it was; `track` names who else is
    told of its rounds, "tensorboard" or "mlflow".
    """
    schedule = read(
        Schedule,
        {
            "seed": seed,
            "rounds": rounds,
            "participation": participation,
            "evaluate_every": evaluate_every,
            "checkpoint_every": checkpoint_every,
            "select": select,
            "targets": tuple(targets) or None,
            "track": tuple(track),
        },
        "",
    )
    if isinstance(attack, str):
        attack = choose(ATTACKS, {"attack": attack}, "train", "attack")[1]
    if isinstance(reducer, str):
        reducer = choose(REDUCERS, {"reducer": reducer}, "train", "reducer")[1]
    between = Between(attack, reducer, privacy)
    if privacy is not None and watcher is None:
        warnings.warn("privacy covers what models are trained with, not the clients' scores", stacklevel=2)
    engine = read(Engine, {"mode": mode, "workers": workers, "dtype": dtype}, "")
    if algorithm.keeps_head and head == "head" and not hasattr(module, "head"):
        raise EquipoiseError(
            f"{type(algorithm).__name__} keeps the model's head on the client; name the submodule that is the head, "
            "or say head=None if there is to be none"
        )
    federation = (
        clients if isinstance(clients, Federation) else from_clients(clients, names=names, split=split, seed=seed)
    )
    if not isinstance(unseen, (int, float)) or not 0 <= unseen < 1:
        raise EquipoiseError(f"unseen = {unseen!r} is not allowed; it must be a number >= 0 and < 1")
    federation = federation.holding_out(unseen, seed)
    number = DTYPES[dtype]
    task = Task(module, federation.prepared(number, False).sample(), head=head, loss=loss, metric=metric, dtype=number)
    if track and out is None:
        raise EquipoiseError(f"track = {list(track)} needs a run folder; say out=...")
    if out is None:
        simulation = Simulation(task, federation, algorithm, schedule, engine, None, watcher, between, devices)
        _run(simulation)
        return Result(simulation)
    named = {"name": name_of(ALGORITHMS, algorithm), **algorithm.table()}
    settings = {
        **schedule.table(),
        "algorithm": named,
        **({"attack": {"name": name_of(ATTACKS, attack), **attack.table()}} if attack else {}),
        "reducer": {"name": name_of(REDUCERS, between.reducer), **between.reducer.table()},
        **({"privacy": privacy.table()} if privacy else {}),
        **({"devices": devices.table()} if devices else {}),
        "model": {"parameters": task.space.size, "layout": task.space.fingerprint()},
        "data": {"clients": len(federation), "unseen": unseen, "samples": federation.fingerprint()},
        "engine": engine.table(),
    }
    with (
        RunFolder.at_work(Path(out), settings, resume, mode=engine.mode_for(task)) as folder,
        followed(watcher or Watcher(), schedule.track, folder, settings) as told,
    ):
        simulation = Simulation(task, federation, algorithm, schedule, engine, folder, told, between, devices)
        if resume:
            simulation.resume()
        _run(simulation)
    return Result(simulation)


def _run(simulation: Simulation) -> None:
    with torch.random.fork_rng(devices=[]):  # a module that draws from torch's own stream leaves the caller's alone
        simulation.run()
