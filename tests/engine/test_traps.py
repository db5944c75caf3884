"""Settings that are allowed and probably not meant bring a warning before the first round."""

import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tomli_w
import torch
from torch import nn

import equipoise as eq
from equipoise.algorithms import ALGORITHMS
from equipoise.callbacks.base import Callback
from tests.support.commands import equipoise_command, small


class Messages(Callback):
    affects_results: ClassVar[bool] = False

    def on_message(self, text: str) -> None:
        TEXTS.append(text)


TEXTS: list[str] = []


class Net(nn.Module):
    def __init__(self, body: bool) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3) if body else nn.Identity()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def told(algorithm: Any, body: bool = True, **more: Any) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(12, 3, generator=generator), torch.arange(12) % 2) for _ in range(3)]
    TEXTS.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.RunWarning)
        eq.train(Net(body), clients, algorithm, rounds=1, callbacks=[Messages()], **more)
    return list(TEXTS)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedeq", "fedbabu", "fedreco"])
def test_a_model_that_is_all_head_shares_nothing_with_methods_that_keep_the_head(name: str) -> None:
    algorithm = ALGORITHMS[name](lr=0.1)
    assert told(algorithm) == []
    [text] = told(algorithm, body=False)
    assert type(algorithm).__name__ in text
    assert "nothing is shared" in text


@pytest.mark.parametrize("name", ["local", "fedavg", "ditto", "fedpac"])
def test_methods_that_do_not_keep_the_head_are_not_warned_about(name: str) -> None:
    assert told(ALGORITHMS[name](lr=0.1), body=False) == []


def test_an_empty_head_is_said() -> None:
    [text] = told(eq.FedRep(lr=0.1), head=None)
    assert "the head is empty" in text


def test_one_client_in_a_round_is_said_where_all_may_be_meant() -> None:
    [text] = told(eq.FedAvg(lr=0.1), participation=1)
    assert "one client of 3" in text
    assert "1.0" in text
    for meant in (1.0, 2, 0.3):
        assert told(eq.FedAvg(lr=0.1), participation=meant) == []


def test_the_command_line_says_it_too(tmp_path: Path) -> None:
    tables = small(algorithm={"name": "fedper"}, participation=1)
    del tables["rounds"]
    (tmp_path / "trap.toml").write_text(tomli_w.dumps({"rounds": 1, **tables}))
    done = equipoise_command("run", "trap.toml", "--quiet", cwd=tmp_path)
    assert done.returncode == 0
    assert "equipoise: FedPer shares all of the model but its head" in done.stderr
    assert "equipoise: participation = 1 is one client of 3" in done.stderr


def test_a_rho_below_the_range_of_flames_theorems_is_said_once() -> None:
    [text] = told(eq.Flame(lam=1.0, rho=0.1, lr=0.1))
    assert "algorithm.rho = 0.1 is below the range of FLAME's convergence theorems" in text
    assert "(alpha = 1 / 3)" in text
    least = float(text.split("rho >= ")[1].split()[0])
    assert told(eq.Flame(lam=1.0, rho=1.01 * least, lr=0.1)) == []
    for other in (eq.FlameLpProj(rho=0.1, lr=0.1, d_sub=4), eq.FedADMM(rho=0.1, lr=0.1), eq.PFedMe(lr=0.1)):
        assert told(other) == []
