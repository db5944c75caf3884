"""Mixed precision: what is computed in bfloat16, and what is not."""

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.algorithms import ALGORITHMS
from equipoise.config.engine import Engine
from equipoise.errors import EquipoiseError
from equipoise.settings import read
from tests.support.problems import small_mlp

CLIENTS = [(torch.randn(30, 5, generator=torch.Generator().manual_seed(i)), torch.arange(30) % 3) for i in range(3)]
SETTINGS = {"rounds": 3, "seed": 0}


class Watched(nn.Linear):
    """A layer that remembers the number formats of its outputs."""

    seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        Watched.seen.add(out.dtype)
        return out


def watched() -> nn.Module:
    module = small_mlp()
    module.head = Watched(8, 3)
    return module


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_operators_are_bfloat16_and_parameters_are_not(mode: str) -> None:
    torch.manual_seed(0)
    module = watched()
    Watched.seen = set()
    exact = eq.train(module, CLIENTS, eq.Ditto(lr=0.1, batch=5), mode=mode, **SETTINGS)
    assert Watched.seen == {torch.float32}
    Watched.seen = set()
    mixed = eq.train(module, CLIENTS, eq.Ditto(lr=0.1, batch=5), mode=mode, precision="bf16-mixed", **SETTINGS)
    assert torch.bfloat16 in Watched.seen
    assert mixed.global_vector().dtype == torch.float32
    assert not torch.equal(mixed.global_vector(), exact.global_vector())
    torch.testing.assert_close(mixed.global_vector(), exact.global_vector(), rtol=0, atol=0.02)
    again = eq.train(
        module, CLIENTS, eq.Ditto(lr=0.1, batch=5), mode=mode, precision="bf16-mixed", workers=1, **SETTINGS
    )
    assert torch.equal(again.global_vector(), mixed.global_vector())


def test_equilibrium_layers_refuse_it() -> None:
    module = eq.equilibrium.Equilibrium(nn.Linear(5, 5))
    with pytest.raises(EquipoiseError, match="'bf16-mixed' is too coarse for the solves of equilibrium layers"):
        eq.train(nn.Sequential(module, nn.Linear(5, 3)), CLIENTS, eq.FedAvg(), head=None, precision="bf16-mixed")


def test_the_old_name_of_the_setting_is_read() -> None:
    assert read(Engine, {"dtype": "float64"}, "engine").precision == "float64"
    assert read(Engine, {"precision": "float64"}, "engine").dtype == torch.float64
    with pytest.raises(EquipoiseError, match=r"unknown setting engine\.dtype"):
        read(Engine, {"dtype": "float64", "precision": "float32"}, "engine")


@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize("kind", ["fedpac", "fedreco", "learn2pfed", "knn-per", "fedrep"])
def test_methods_that_read_representations_train_with_it(kind: str, mode: str) -> None:
    result = eq.train(
        small_mlp(), CLIENTS, ALGORITHMS[kind](lr=0.1, batch=5), mode=mode, precision="bf16-mixed", rounds=2
    )
    assert result.summary["left_out"] == 0
    assert result.summary["personal"]["loss"] is not None
