"""Code as a user would write it, in files beside an experiment."""

from pathlib import Path
from typing import Any

import tomli_w

MINE = '''
from helper import strength

from equipoise import Algorithm, State, Upload
from equipoise.settings import NonNegative


class Mine(Algorithm):
    """Local steps that are pulled to the global model."""

    lam: NonNegative = 0.5
    "strength of the pull"
    rates: tuple[float, ...] = (0.1, 0.2)
    "numbers that belong together"

    def init_server(self, start):
        return State(w=start.w0)

    def local_update(self, client, down, data):
        w = data.descend(down.w, pull=lambda v: strength(self.lam) * (v - down.w))
        return client, Upload(State(w=w), reference=down, weight=data.size)

    def aggregate(self, server, uploads, reduce):
        return reduce(uploads)

    def global_model(self, server):
        return server.w


class FedAvg(Mine):
    """Has the name of another class, and trains differently."""
'''
HELPER = "def strength(lam):\n    return 2 * lam\n"
NET = '''
from math import prod

from torch import nn


class Net(nn.Module):
    """A network with a last layer that is not called head.

    Args:
        hidden: width of the hidden layer
    """

    def __init__(self, shape, outputs: int, hidden: int = 4, sizes: list[int] = [1, 2], activation=nn.ReLU):
        super().__init__()
        assert isinstance(sizes, list)
        self.first = nn.Linear(prod(shape), hidden)
        self.last = nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.last(self.first(x.flatten(1)).relu())
'''
BLOBS = '''
from pathlib import Path

import numpy as np


def make(seed, folder: Path, samples: int = 20, wards: list[str] = ["a", "b", "c"]):
    """Blobs, one client per ward."""
    assert folder.is_dir()
    found = {}
    for k, ward in enumerate(wards):
        rng = np.random.default_rng([seed, k])
        y = rng.integers(0, 3, samples)
        found[ward] = (rng.normal(size=(samples, 4)) + y[:, None], y)
    return found
'''
REST = '''
import numpy as np

from equipoise import Attack, State, WeightedMean
from equipoise.data.partitions.base import Dealt


class InTurn(Dealt):
    """Deals samples in turn."""

    start: int = 0
    "the first client to get one"

    def divide(self, labels, clients, rng):
        return [np.arange(i, len(labels), clients) for i in range(clients)]


class Louder(Attack):
    """Sends a multiple of the honest message."""

    factor: float = 10.0

    def message(self, own, rng):
        return State({key: self.factor * value for key, value in own.items()})


class MyMean(WeightedMean):
    """A mean."""
'''


def write_code(folder: Path) -> Path:
    """Write the code into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"mine": MINE, "helper": HELPER, "net": NET, "blobs": BLOBS, "rest": REST}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def own_tables(**more: Any) -> dict[str, Any]:
    """Everything that can be named is own code, in the folder `code` beside the experiment."""
    tables: dict[str, Any] = {
        "rounds": 2,
        "data": {"name": "code/blobs.py:make", "folder": "code"},
        "model": {"name": "code/net.py:Net", "hidden": 3, "head": "last"},
        "algorithm": {"name": "code/mine.py:Mine", "lr": 0.1},
        "attack": {"name": "code/rest.py:Louder", "clients": ["b"]},
        "reducer": {"name": "code/rest.py:MyMean"},
    }
    for key, value in more.items():
        tables[key] = {**tables[key], **value} if isinstance(value, dict) and key in tables else value
    return tables


def write_experiment(folder: Path, **more: Any) -> Path:
    """Write the code and an experiment that uses it, and return the experiment's file."""
    write_code(folder / "code")
    file = folder / "mine.toml"
    file.write_text(tomli_w.dumps(own_tables(**more)))
    return file
