"""A resumed run says which of model, weights, data, split or settings differs, and how."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.engine import checkpoint_manifest
from equipoise.engine.origin import describe_origin, find_difference, legacy_fingerprint
from equipoise.training.task import Task
from tests.support.odd_models import CLIENTS, module

NAMES = ["a", "b", "c", "d"]


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))


def moved() -> nn.Module:
    other = module()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-6
    return other


def changed(what: int, by: float) -> list[tuple[np.ndarray, np.ndarray]]:
    clients = [[x.copy(), y.copy()] for x, y in CLIENTS]
    clients[2][what].flat[0] = clients[2][what].flat[0] + by if what == 0 else (clients[2][what].flat[0] + 1) % 3
    return [(x, y) for x, y in clients]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("resume") / "run"
    eq.train(module(), CLIENTS, eq.FedAvg(), head="2", rounds=1, names=NAMES, unseen=0.25, out=out)
    return out


OTHERS = {
    "layer": ({"module": wider()}, "the module differs: its parameter number 4 is nothing, and '2.bias' of shape [3]"),
    "shape": (
        {"module": module(4)},
        "number 3 is '2.weight' of shape [4, 5], and '2.weight' of shape [3, 5]",
    ),
    "head": ({"head": None}, "the head differs: it has 0 parameters, and 18 in the saved run"),
    "weights": ({"module": moved()}, "the initial weights differ: seed torch before you build the module"),
    "clients": (
        {"clients": CLIENTS[:3], "names": NAMES[:3]},
        "clients differ: there are 3, and 4 in the saved run",
    ),
    "names": ({"names": ["a", "b", "c", "e"]}, "the clients differ: they have other names, or another order"),
    "count": (
        {"clients": [*CLIENTS[:3], tuple(a[:-1] for a in CLIENTS[3])]},
        "there are 85 samples with inputs of",
    ),
    "inputs": ({"clients": changed(0, 1e-3)}, "the data differ: the inputs have other values"),
    "targets": ({"clients": changed(1, 1)}, "the data differ: the targets have other values"),
    "split": ({"split": (0.6, 0.2, 0.2)}, "the split differs: the samples are the same, but divided otherwise"),
    "settings": ({"algorithm": eq.FedAvg(batch=7)}, "had algorithm.batch = 50, not 7"),
    "unseen": ({"unseen": 0.5}, "had data.unseen = 0.25, not 0.5"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_differs_is_said(what: str, folder: Path) -> None:
    usual = {"module": module(), "clients": CLIENTS, "algorithm": eq.FedAvg(), "head": "2", "names": NAMES}
    given, words = OTHERS[what]
    options = {**usual, "unseen": 0.25, "rounds": 2, "out": folder, "resume": True, **given}
    with pytest.raises(eq.EquipoiseError) as error:
        eq.train(options.pop("module"), options.pop("clients"), options.pop("algorithm"), **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_others_held_out_are_told_where_settings_do_not_show_them() -> None:
    federation = eq.from_clients(CLIENTS)
    task = Task(module(), federation.sample(), head=None)
    one, two = (describe_origin(replace(federation, unseen=frozenset([name])), task) for name in federation.names[:2])
    assert "kept out of training differ" in str(find_difference(one, two))
    assert find_difference(one, json.loads(json.dumps(one))) is None


@pytest.mark.parametrize("damage", [None, 0, 1, 2])
def test_checkpoints_of_the_older_format_are_resumed_and_explained(damage: int | None, tmp_path: Path) -> None:
    options = {"head": None, "out": tmp_path / "run"}
    eq.train(module(), CLIENTS, eq.FedAvg(), rounds=1, **options)
    simulation = eq.train(module(), CLIENTS, eq.FedAvg(), rounds=1, head=None).simulation
    parts = legacy_fingerprint(simulation.federation, simulation.task).split()
    if damage is not None:
        parts[damage] = "0" * 16
    (path,) = (tmp_path / "run" / "checkpoint").glob("round-*.json")
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    manifest["facts"]["fingerprint"] = " ".join(parts)
    path.write_text(json.dumps({**manifest, "digest": checkpoint_manifest.digest_of(manifest)}))
    if damage is None:
        longer = eq.train(module(), CLIENTS, eq.FedAvg(), rounds=2, resume=True, **options)
        assert longer.metrics == eq.train(module(), CLIENTS, eq.FedAvg(), rounds=2, head=None).metrics
        return
    words = ("the data, their split, or", "the module differs", "the initial weights differ: seed torch")[damage]
    with pytest.raises(eq.EquipoiseError, match=words):
        eq.train(module(), CLIENTS, eq.FedAvg(), rounds=2, resume=True, **options)
