"""Devices of unequal power: who affords what, that they do no more, and how they count."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.algorithms import FedAvg, FlDEQ
from equipoise.config.device_classes import Devices
from equipoise.equilibrium import Equilibrium, Solves
from equipoise.errors import EquipoiseError
from equipoise.executors.base import ClientResult
from equipoise.flower.client import Client
from equipoise.flower.protocol import Order
from equipoise.models.base import BodyAndHead
from equipoise.settings import read
from tests.support.flower_memory import WALL, deployed, run, same
from tests.support.problems import classification, simulation


class Slow(nn.Module):
    """z = tanh(W z + u), which never comes within a tolerance of zero."""

    calls = 0

    def __init__(self, width: int = 6):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.ones(width, width))

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        Slow.calls += 1
        return torch.tanh(z @ self.weight + u)


def module(limit: int = 10, gradient: str = "implicit") -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = Equilibrium(Slow(), solver="plain", tol=0.0, limit=limit, gradient=gradient, warm_start="off")
        return BodyAndHead(nn.Sequential(nn.Linear(5, 6), layer), nn.Linear(6, 3))


def trained(algorithm: FedAvg, devices: Devices | None) -> dict[str, ClientResult]:
    sim = simulation(algorithm, module=module(), participation=1.0, devices=devices)
    done = list(sim.executor.train(1, [sim.job(who) for who in sim.training], lambda: False))
    sim.close()
    return {sim.federation.names[d.who]: d for d in done}


def test_a_client_with_three_iterations_does_three_each_way() -> None:
    devices = Devices(iterations=(10, 3), fractions=(0.5, 0.5))
    budgets = devices.budgets(classification().names, 0)
    assert sorted(budgets.values()) == [3, 3, 3, 10, 10, 10]
    for name, done in trained(FlDEQ(batch=4), devices).items():
        (solves,) = done.solves.values()
        assert solves.forward.mean == budgets[name]
        assert solves.backward.mean == budgets[name]
        assert done.upload.weight.item() == budgets[name]


def test_f_is_called_as_often_as_the_budget_says() -> None:
    calls = {}
    for k in (3, 10):
        sim = simulation(
            FlDEQ(batch=10**6, steps=1),
            module=module(gradient="jacobian-free"),
            participation=1,
            devices=Devices(iterations=(k,), fractions=(1.0,)),
        )
        Slow.calls = 0
        list(sim.executor.train(1, [sim.job(5)], lambda: False))
        calls[k] = Slow.calls
        sim.close()
    assert calls[10] - calls[3] == 7
    assert calls[3] in (3, 4)  # and once for the gradient


def test_scores_are_of_the_whole_model_whatever_a_device_affords() -> None:
    """Two runs that end with the same vector score the same, though one has weak devices."""
    weak = simulation(FlDEQ(), module=module(), devices=Devices(iterations=(2,), fractions=(1.0,)), rounds=1)
    free = simulation(FlDEQ(), module=module(), rounds=1)
    for sim in (weak, free):
        sim.scores.training(1, sim.server, sim.store)
        sim.close()
    np.testing.assert_array_equal(
        weak.scores.training.tables["global"].scores, free.scores.training.tables["global"].scores
    )


def test_the_fusion_is_the_mean_weighted_by_iterations() -> None:
    devices = Devices(iterations=(10, 3), fractions=(0.5, 0.5))
    done = trained(FlDEQ(batch=4), devices)
    sim = simulation(FlDEQ(batch=4), module=module(), participation=1.0, devices=devices)
    sim.advance()
    sim.close()
    k = devices.budgets(tuple(done), 0)
    wanted = sum(k[name] * d.upload.message.w for name, d in done.items()) / sum(k.values())
    torch.testing.assert_close(sim.server.w, wanted, rtol=1e-12, atol=1e-14)
    plain = simulation(FlDEQ(batch=4, fusion="plain"), module=module(), participation=1.0, devices=devices)
    plain.advance()
    plain.close()
    torch.testing.assert_close(
        plain.server.w, sum(d.upload.message.w for d in done.values()) / len(done), rtol=1e-12, atol=1e-14
    )
    assert not torch.allclose(plain.server.w, sim.server.w)


@pytest.mark.parametrize("devices", [None, Devices(iterations=(4,), fractions=(1.0,))])
def test_fusion_with_equal_iterations_is_the_plain_mean(devices: Devices | None) -> None:
    ends = []
    for fusion in ("iterations", "plain"):
        sim = simulation(FlDEQ(batch=4, fusion=fusion), module=module(), participation=1.0, rounds=2, devices=devices)
        sim.run()
        ends.append(sim.server.w)
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-14)


def test_budgets_hold_for_every_algorithm() -> None:
    """A budget at the layer's own limit changes nothing; a smaller one does."""
    ends = {}
    for k in (None, 10, 2):
        devices = None if k is None else Devices(iterations=(k,), fractions=(1.0,))
        sim = simulation(FedAvg(batch=4, lr=0.1), module=module(), devices=devices)
        sim.run()
        ends[k] = sim.server.w
    assert torch.equal(ends[None], ends[10])
    assert not torch.equal(ends[None], ends[2])


@given(st.integers(1, 60), st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 9))
def test_classes_have_the_sizes_that_their_fractions_say(clients: int, iterations: list[int], seed: int) -> None:
    share = 1 / len(iterations)
    devices = Devices(iterations=tuple(iterations), fractions=tuple(share for _ in iterations))
    names = [f"c{i:02d}" for i in range(clients)]
    budgets = devices.budgets(names, seed)
    assert budgets == devices.budgets(names[::-1], seed)  # whatever order they are named in
    assert budgets.keys() == set(names)
    for k in set(iterations):
        classes = iterations.count(k)
        assert abs(list(budgets.values()).count(k) - classes * share * clients) <= classes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"iterations": [10, 3], "fractions": [0.5]}, "devices.iterations has 2 classes and devices.fractions 1"),
        ({"iterations": [10, 3], "fractions": [0.5, 0.6]}, "they must sum to 1, not 1.1"),
        ({"iterations": [0], "fractions": [1.0]}, "devices.iterations = [0] is not allowed"),
        ({"fraction": [1.0]}, "unknown setting devices.fraction; did you mean 'fractions'?"),
    ],
)
def test_wrong_devices_are_told(settings: dict, words: str) -> None:
    with pytest.raises(EquipoiseError, match=re.escape(words)):
        read(Devices, settings, "devices")


def test_a_model_without_equilibria_has_no_iterations_to_set() -> None:
    with pytest.raises(EquipoiseError, match="the model has none; leave the section out"):
        simulation(FedAvg(), devices=Devices(iterations=(3,), fractions=(1.0,)))


def test_both_engines_give_devices_the_same_budgets(tmp_path: Path) -> None:
    federation = classification().holding_out(0.2, 0)
    table = {"iterations": [10, 3], "fractions": [0.6, 0.4]}
    simulated = simulation(
        FlDEQ(lr=0.1, batch=4), federation, module(), rounds=3, devices=read(Devices, table, "devices")
    )
    simulated.run()
    algorithm = {"name": "fl-deq", "lr": 0.1, "batch": 4}
    app, grid = deployed(tmp_path / "app", federation, module(), algorithm, rounds=3, participation=0.5, devices=table)
    over_flower = run(app, grid, tmp_path / "flower")
    assert over_flower.budgets == simulated.budgets
    ours, theirs = over_flower.summary(), simulated.summary()
    assert theirs["devices"] == {"10": 3, "3": 2}
    same({k: ours[k] for k in theirs if k not in WALL}, {k: v for k, v in theirs.items() if k not in WALL})


@pytest.mark.parametrize(("own", "both", "alone"), [(0, 3, None), (5, 3, 5), (2, 2, 2)])
def test_a_client_may_say_what_its_own_machine_affords(own: int, both: int, alone: int | None) -> None:
    """The smaller of what the experiment (3, or nothing) and the client say holds."""
    client = SimpleNamespace(settings=SimpleNamespace(iterations=own))
    assert Client._budget(client, Order(run="0" * 32, iterations=3)) == both
    assert Client._budget(client, Order(run="0" * 32)) == alone


def test_a_budget_that_does_not_bind_hides_no_failure() -> None:
    layer = Equilibrium(Slow(), solver="plain", tol=0.0, limit=5)
    layer.quiet = True
    for budget, told in ((None, 2), (5, 2), (9, 2), (4, 0)):
        layer.budget, layer.solves = budget, Solves()
        layer(torch.ones(2, 6))
        assert layer.tally.unconverged == told
