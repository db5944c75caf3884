"""FL-DEQ's weights: the iterations that clients performed, which a model whose residuals are known makes countable."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.algorithms import FlDEQ
from equipoise.algorithms.local_data import LocalData
from equipoise.config.device_classes import Devices
from equipoise.data.federation import Federation, from_clients
from equipoise.equilibrium import Equilibrium
from equipoise.executors.base import ClientResult
from equipoise.models.base import BodyAndHead
from equipoise.state import State, Upload
from tests.support.flower_memory import WALL, deployed, run, same, table
from tests.support.problems import metrics, simulation

TOL, LIMIT = 0.05, 10
SIZES = (3, 5, 8, 4)


class Affine(nn.Module):
    """z = rate z + u with the sample's own rate; the residual of its plain iteration depends on the rate alone."""

    def __init__(self, tol: float) -> None:
        super().__init__()
        self.lift = nn.Linear(2, 4)
        settings = {"solver": "plain", "tol": tol, "limit": LIMIT, "warm_start": "off"}
        self.solve = Equilibrium(lambda z, u, rate: rate * z + u, **settings)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.solve(self.lift(x[:, :2]), x[:, 2:])
        return out


def module(tol: float = TOL) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BodyAndHead(Affine(tol), nn.Linear(4, 3))


def federation() -> Federation:
    """Clients whose samples contract at rates of their own, the later clients' more slowly."""
    rng = np.random.default_rng(1)
    clients = []
    for i, n in enumerate(SIZES):
        x = np.concatenate([rng.normal(size=(n, 2)), rng.uniform(0.2 * i, 0.2 * i + 0.35, size=(n, 1))], axis=1)
        clients.append({"train": (x, rng.integers(0, 3, n)), "test": (x, rng.integers(0, 3, n))})
    return from_clients(clients)


def needed(rate: float, limit: int) -> int:
    """The first k whose residual, rate^(k-1) (1 - rate) / (1 - rate^k), is within the tolerance."""
    return next(k for k in range(1, limit + 1) if k == limit or rate ** (k - 1) * (1 - rate) / (1 - rate**k) <= TOL)


def performed(data: Federation, budgets: dict[str, int]) -> dict[str, float]:
    """By hand: every sample is in one batch of an epoch, so the mean over samples is that over solves."""
    return {
        name: float(np.mean([needed(r, budgets.get(name, LIMIT)) for r in data.x[data.train[i]][:, 2].tolist()]))
        for i, name in enumerate(data.names)
    }


def trained(algorithm: FlDEQ, devices: Devices | None = None, tol: float = TOL) -> dict[str, ClientResult]:
    sim = simulation(algorithm, federation(), module(tol), participation=1.0, devices=devices)
    done = list(sim.executor.train(1, [sim.job(who) for who in sim.training], lambda: False))
    sim.close()
    return {sim.federation.names[d.who]: d for d in done}


@pytest.mark.parametrize("devices", [None, Devices(iterations=(10, 3), fractions=(0.5, 0.5))])
def test_clients_are_weighted_by_the_iterations_that_they_performed(devices: Devices | None) -> None:
    algorithm = FlDEQ(lr=0.1, batch=2, epochs=2)
    done = trained(algorithm, devices)
    data = federation()
    k = performed(data, {} if devices is None else devices.budgets(data.names, 0))
    assert len(set(k.values())) > 2
    for name, each in done.items():
        assert each.upload.weight.item() == pytest.approx(k[name], rel=1e-12)
    sim = simulation(algorithm, data, module(), participation=1.0, devices=devices)
    sim.advance()
    sim.close()
    wanted = sum(k[name] * d.upload.message.w for name, d in done.items()) / sum(k.values())
    torch.testing.assert_close(sim.server.w, wanted, rtol=1e-12, atol=1e-14)


def test_iterations_that_are_performed_in_full_are_the_limit() -> None:
    devices, ends = Devices(iterations=(10, 3), fractions=(0.5, 0.5)), []
    budgets = devices.budgets(federation().names, 0)
    for fusion in ("iterations", "limit"):
        done = trained(FlDEQ(lr=0.1, batch=2, fusion=fusion), devices, tol=0.0)
        assert {name: d.upload.weight.item() for name, d in done.items()} == budgets
        sim = simulation(FlDEQ(lr=0.1, batch=2, fusion=fusion), federation(), module(0.0), devices=devices)
        sim.run()
        ends.append(sim.server.w)
    assert torch.equal(*ends)


def test_the_limit_remains_a_choice() -> None:
    done = trained(FlDEQ(lr=0.1, batch=2, fusion="limit"))
    assert {d.upload.weight.item() for d in done.values()} == {LIMIT}


class Idle(FlDEQ):
    """Sends what it got."""

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        return client, Upload(State(w=down.w), reference=down, weight=data.iterations_performed)


def test_a_client_that_solves_nothing_weighs_one() -> None:
    """Whatever was solved before: the round counts by itself, and so does each client."""
    sim = simulation(FlDEQ(lr=0.1, batch=2), federation(), module(), participation=1.0, rounds=1)
    sim.run()
    job = sim.job(3)
    sim.close()
    again = simulation(Idle(), federation(), module())
    for algorithm in (FlDEQ(lr=0.1, batch=2), Idle(), FlDEQ(lr=0.1, batch=2)):
        again.executor.algorithm = algorithm
        (found,) = again.executor.train(1, [job], lambda: False)
        assert (found.upload.weight.item() == 1) == isinstance(algorithm, Idle)
    again.close()
    plain = simulation(FlDEQ(lr=0.1, batch=2))  # no layer to solve
    assert [d.upload.weight.item() for d in plain.executor.train(1, [plain.job(2)], lambda: False)] == [1]
    plain.close()


def test_both_engines_weigh_alike_and_a_resumed_run_gives_the_same_bytes(tmp_path: Path) -> None:
    algorithm = FlDEQ(lr=0.1, batch=2)
    kinds = {"rounds": 4, "participation": 0.75, "checkpoint_every": 1}
    whole = simulation(algorithm, federation(), module(), folder=tmp_path / "whole", **kinds)
    whole.run()
    first = simulation(algorithm, federation(), module(), folder=tmp_path / "cut", **kinds)
    first.advance()
    first.advance()
    first.close()
    rest = simulation(algorithm, federation(), module(), folder=tmp_path / "cut", new=False, **kinds)
    rest.resume()
    assert rest.done == 2
    rest.run()
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    app, grid = deployed(tmp_path / "app", federation(), module(), table(algorithm), **kinds)
    over_flower = run(app, grid, tmp_path / "flower")
    ours, theirs = over_flower.summary(), whole.summary()
    assert 1 < theirs["solver_iterations"] < LIMIT
    same({k: ours[k] for k in theirs if k not in WALL}, {k: v for k, v in theirs.items() if k not in WALL})
    np.testing.assert_allclose(over_flower.server.w, whole.server.w, rtol=1e-9, atol=1e-12)
