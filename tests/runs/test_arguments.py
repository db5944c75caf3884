"""Mistakes in what is given to `train`, each of which gets one sentence."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.runs.arguments import own_module
from tests.support.commands import is_one_sentence
from tests.support.odd_models import CLIENTS, module

X, Y = CLIENTS[0]


class Returns(nn.Module):
    """Returns anything."""

    def __init__(self, make) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 3), make

    def forward(self, x: Tensor):
        return self.make(self.layer(x))


class TwoInputs(Returns):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.layer(x + z)


def spoilt() -> nn.Module:
    given = module()
    given[2].bias.data[1] = float("nan")
    return given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"algorithm": "fedavgg"}, "train.algorithm = 'fedavgg' is unknown; did you mean 'fedavg'?"),
        (
            {"algorithm": eq.FedAvg},
            "algorithm is the class FedAvg; create it with its settings, such as FedAvg(",
        ),
        ({"algorithm": None}, "algorithm is of type NoneType; it must be an algorithm with its settings"),
        ({"algorithm": {"name": "fedavg"}}, "algorithm is of type dict"),
        ({"module": CLIENTS, "clients": module()}, "module is of type list; it must be a torch nn.Module"),
        ({"module": nn.Linear}, "module is the class Linear; create a module of it: Linear(...)"),
        ({"module": module}, "module is of type function"),
        ({"module": nn.LazyLinear(3)}, "'weight' has no shape yet (a lazy layer); call the module on a batch first"),
        ({"module": nn.Linear(4, 3, device="meta")}, "'weight' has no values yet"),
        ({"module": spoilt()}, "the module's '2.bias' has NaN or infinite numbers before training"),
        ({"module": Returns(lambda out: (out, out))}, "the model returns tuple for 2 samples"),
        ({"module": Returns(lambda out: {"logits": out})}, "the model returns dict for 2 samples"),
        ({"module": Returns(lambda out: out.sum())}, "the model returns the shape () for 2 samples"),
        ({"module": TwoInputs(None)}, "missing 1 required positional argument: 'z'"),
        ({"clients": [(X.astype(int), Y)]}, "they are of type int64, so if they are not symbols, convert them"),
        (
            {"clients": [(X, Y.astype("float32"))]},
            "classes as whole numbers, and the targets are of type float32",
        ),
        ({"clients": [(X, Y - 1)]}, "there is a label -1; the classes must be numbered from 0"),
        ({"clients": [(X, Y[:, None])]}, "needs one whole number per sample as its target"),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss; create it: CrossEntropyLoss()"),
        ({"loss": 3}, "loss = 3 is not allowed; available: cross-entropy, squared, pinball, or a function"),
        ({"loss": lambda o, t: 1.0}, "the loss returns float; it must return a tensor"),
        ({"head": nn.Linear(5, 3)}, "head=a Linear is not allowed; it must be the name of a submodule"),
        ({"head": 2}, "head=2 is not allowed; it must be the name of a submodule"),
        ({"privacy": {"clip": 1.0}}, "privacy is of type dict; it must be equipoise.Privacy(clip=1.0"),
        ({"privacy": eq.Privacy}, "privacy is the class Privacy; create it with its settings"),
        ({"devices": [20, 10]}, "devices is of type list; it must be equipoise.Devices"),
        ({"attack": eq.SignFlip}, "attack is the class SignFlip; create it with its settings"),
        ({"reducer": eq.Median}, "reducer is the class Median; create it with its settings"),
        ({"reducer": None}, "reducer is of type NoneType"),
        ({"targets": 0.8}, "targets = 0.8 is not allowed; it must be a list, such as [0.8]"),
        ({"track": "tensorboard"}, "track = 'tensorboard' is not allowed; it must be a list"),
        ({"out": 5}, "out = 5 is not allowed; it must be the path of a folder"),
        ({"out": ""}, "out = '' is not allowed"),
        ({"resume": True}, "resume=True continues the run in a folder; say which with out="),
        ({"rounds": "3"}, "rounds = '3' is not allowed; it must be a whole number >= 1"),
    ],
)
def test_a_mistake_gets_a_sentence(given: dict, words: str) -> None:
    options = {"module": module(), "clients": CLIENTS, "algorithm": eq.FedAvg(), "head": None, "rounds": 1, **given}
    with pytest.raises(eq.EquipoiseError) as error:
        eq.train(options.pop("module"), options.pop("clients"), options.pop("algorithm"), **options)
    is_one_sentence(error.value, words)


def test_an_algorithm_may_be_given_by_its_name() -> None:
    by_name, itself = (eq.train(module(), CLIENTS, a, head=None, rounds=1) for a in ("ditto", eq.Ditto()))
    assert by_name.metrics == itself.metrics


def test_values_of_numpy_are_settings_too() -> None:
    assert eq.FedAvg(lr=np.float32(0.5), epochs=np.int64(2)) == eq.FedAvg(lr=0.5, epochs=2)
    assert eq.KnnPer(k=np.array([3, 4])) == eq.KnnPer(k=(3, 4))
    with pytest.raises(eq.EquipoiseError, match=r"FedAvg\.lr = -1\.0 is not allowed"):
        eq.FedAvg(lr=np.float64(-1))


def test_a_module_is_found_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self): super().__init__(2, 1)\n"
        "net = Net()\nfour = 4\nLinear = torch.nn.Linear\ndef nothing(): return None\n"
    )
    for name in ("Net", "net"):
        assert isinstance(own_module(f"{file}:{name}"), torch.nn.Linear)
    for name, words in (
        ("four", "is of type int; it must give a torch nn.Module"),
        ("nothing", "is of type NoneType; it must give"),
        ("Linear", "cannot be called without arguments: TypeError"),
        ("net2", "net.py; did you mean 'net'?"),
    ):
        with pytest.raises(eq.EquipoiseError) as error:
            own_module(f"{file}:{name}")
        is_one_sentence(error.value, words)
