"""Small federations on which everything is known."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.callbacks.callback_list import CallbackList
from equipoise.config.device_classes import Devices
from equipoise.config.engine import Engine, Schedule
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import Federation, from_clients
from equipoise.distributed.ranks import Ranks
from equipoise.engine.simulation import Simulation
from equipoise.models.base import BodyAndHead
from equipoise.storage.run_folder import RunFolder
from equipoise.torch_device import choose_device
from equipoise.training.task import Task

FULL = 10**6
"""A batch that is never full: all samples in every step."""


def classification(clients: int = 6, seed: int = 0, names: list[str] | None = None) -> Federation:
    """Ragged clients with labels of their own: from 3 samples (less than a batch) upwards, one without validation."""
    rng = np.random.default_rng(seed)
    parts = []
    for i in range(clients):
        n = 3 + 5 * i
        x = rng.normal(size=(n + 6, 5))
        y = (x @ rng.normal(size=(5, 3))).argmax(1)
        part = {"train": (x[:n], y[:n]), "test": (x[n + 3 :], y[n + 3 :])}
        if i != 1:
            part["validation"] = (x[n : n + 3], y[n : n + 3])
        parts.append(part)
    return from_clients(parts, names=names)


def images(clients: int = 6, seed: int = 0, **facts: Any) -> Federation:
    """Small images of three classes, which are large enough for a mark of the usual pixels."""
    rng = np.random.default_rng(seed)
    parts = []
    for i in range(clients):
        y = rng.integers(3, size=30 + 3 * i)
        x = rng.random((len(y), 1, 4, 10)).astype(np.float32)
        x[:, 0, 1, :] = y[:, None] / 3
        parts.append((x, y))
    return replace(from_clients(parts), **facts)


def image_module() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BodyAndHead(nn.Flatten(), nn.Linear(40, 3))


@dataclass
class LeastSquares:
    """Clients with ½-mean-squared losses whose optima are known: gradient S_i v - c_i with the loss (v·x - y)²."""

    clients: int = 4
    samples: int = 12
    features: int = 3
    x: list[np.ndarray] = field(default_factory=list)
    y: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(3)
        for i in range(self.clients):
            n = self.samples + 4 * i
            self.x.append(rng.normal(size=(n, self.features)))
            self.y.append(self.x[-1] @ rng.normal(size=self.features) + 0.1 * rng.normal(size=n))

    def federation(self) -> Federation:
        return from_clients([{"train": (x, y), "test": (x, y)} for x, y in zip(self.x, self.y, strict=True)])

    def hessian(self, i: int) -> np.ndarray:
        """Of the mean squared error, whose gradient is H v - g."""
        return 2 * self.x[i].T @ self.x[i] / len(self.x[i])

    def right(self, i: int) -> np.ndarray:
        return 2 * self.x[i].T @ self.y[i] / len(self.x[i])

    def local(self, i: int) -> np.ndarray:
        return np.linalg.solve(self.hessian(i), self.right(i))

    def pooled(self) -> np.ndarray:
        return np.linalg.lstsq(np.concatenate(self.x), np.concatenate(self.y), rcond=None)[0]

    def smoothness(self) -> float:
        return max(np.linalg.eigvalsh(self.hessian(i)).max() for i in range(self.clients))


def linear_module(features: int = 3) -> nn.Module:
    """y = v·x, the weights all head."""
    module = BodyAndHead(nn.Identity(), nn.Linear(features, 1, bias=False))
    nn.init.zeros_(module.head.weight)
    return module


def small_mlp(seed: int = 0, features: int = 5, outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # The name is that under which FedCR looks for means and spreads.
        body = nn.Sequential(OrderedDict(encoder=nn.Linear(features, 8), tanh=nn.Tanh()))
        return BodyAndHead(body, nn.Linear(8, outputs))


def simulation(
    algorithm: Algorithm,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    *,
    folder: Path | None = None,
    mode: str = "threads",
    workers: int = 1,
    head: Any = "head",
    loss: Any = "cross-entropy",
    metric: Any = None,
    dtype: str = "float64",
    new: bool = True,
    uploads: UploadSettings | None = None,
    devices: Devices | None = None,
    ranks: Ranks | None = None,
    callbacks: CallbackList | None = None,
    device: str = "cpu",
    data: str = "auto",
    **schedule: Any,
) -> Simulation:
    """A run of a small problem, ready to go."""
    federation = federation or classification()
    number = {"float32": torch.float32, "float64": torch.float64}[dtype]
    sample = federation.prepared(number, False).sample()
    metric = schedule.get("metrics") if metric is None else metric
    task = Task(
        module or small_mlp(), sample, head=head, loss=loss, metric=metric, dtype=number, device=choose_device(device)
    )
    run_folder = None
    if folder is not None:
        run_folder = RunFolder(folder)
        if new and (ranks is None or ranks.leader):
            folder.mkdir(parents=True)
            run_folder.write_config()
        if ranks is not None:
            ranks.barrier()
    schedule = {"rounds": 4, "participation": 0.5, **schedule}
    engine = Engine.model_validate(
        {"mode": mode, "workers": workers, "precision": dtype, "device": device, "data": data}
    )
    settings = (algorithm, Schedule(**schedule), engine)
    return Simulation(task, federation, *settings, run_folder, callbacks, uploads, devices, ranks)


def least_squares(problem: LeastSquares, algorithm: Algorithm, head: Any = "head", **schedule: Any) -> Simulation:
    # Stacked, as the many small steps that a limit takes go quickest so.
    schedule = {"participation": 1.0, "evaluate_every": 10**6, "mode": "stacked", **schedule}
    run = simulation(
        algorithm, problem.federation(), linear_module(problem.features), head=head, loss="squared", **schedule
    )
    run.run()
    return run


LOSS_CELLS = {"fit": "loss", "solve": "gradient", "solve_steps": 2}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "learn2pfed-loss": ("learn2pfed", {**LOSS_CELLS, "outer": "validation"}),
    "learn2pfed-joint": (
        "learn2pfed",
        {**LOSS_CELLS, "network": "joint", "optimizer": "adam", "outer": "folds", "folds": 2, "tied": ("lam",)},
    ),
}
"""Settings under which an algorithm keeps or computes something else, so that they are tested like one of their own."""


def registered(name: str) -> Algorithm:
    """An algorithm, or a variant of one, as the registry-wide tests use it."""
    name, own = VARIANTS.get(name, (name, {}))
    cls = ALGORITHMS[name]
    # Methods with a loop of their own inside a round need not show all of it everywhere.
    quick = {"local_rounds": 2, "inner_steps": 2, "cells": 2}
    quick = {key: value for key, value in quick.items() if key in cls.model_fields}
    return cls(lr=0.05, epochs=2, batch=4, **quick, **own)


KINDS = ["fedavg", "ditto", "fedrep", "flame", "learn2pfed"]
"""One of each kind, for what is the engine's doing and takes long: nothing kept by clients, models of their own, heads,
last messages of all, and several exchanges in a round."""


EVERY = [*ALGORITHMS, *VARIANTS]
IN_MODES = [*((name, "threads") for name in EVERY), *((name, "stacked") for name in KINDS)]


def metrics(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()
