"""The step of a server optimizer in a run: which fields it moves, and that its memory survives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.algorithms import ALGORITHMS
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.privacy.mechanisms import Privacy
from tests.algorithms.test_partial_sharing import normalised
from tests.support.flower_memory import deployed, run, table
from tests.support.problems import FULL, LeastSquares, classification, least_squares, registered, simulation, small_mlp

AVERAGING = sorted(name for name, cls in ALGORITHMS.items() if cls.averaged)
PLAIN = {"kind": "sgd", "lr": 1.0, "beta1": 0.0}


def finished(algorithm: eq.Algorithm, **options: Any) -> Simulation:
    sim = simulation(algorithm, **{"rounds": 3, **options})
    sim.run()
    return sim


def stepping(name: str, optimizer: Any) -> eq.Algorithm:
    return type(registered(name))(**{**dict(registered(name)), "server_optimizer": optimizer})


def test_at_rate_one_without_momentum_a_run_has_the_same_bytes(tmp_path: Path) -> None:
    for name, optimizer in (("with", PLAIN), ("without", None)):
        finished(stepping("ditto", optimizer), folder=tmp_path / name)
    assert (tmp_path / "with/metrics.jsonl").read_bytes() == (tmp_path / "without/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", AVERAGING)
def test_it_moves_what_is_averaged_and_nothing_else(name: str) -> None:
    """At rate 2 without momentum, the averaged fields go twice as far in the first round, and the others as far."""
    module = normalised() if name == "fedbn" else None
    one, two = (
        finished(stepping(name, {**PLAIN, "lr": lr}), module=module, rounds=1, participation=1.0) for lr in (1.0, 2.0)
    )
    first = simulation(registered(name), module=module)
    averaged = ALGORITHMS[name].averaged
    for field, before in first.server.items():
        near, far = one.server[field], two.server[field]
        if field in averaged:
            assert not torch.equal(near, before)
            torch.testing.assert_close(far - before, 2 * (near - before), rtol=1e-9, atol=1e-12)
        else:
            assert torch.equal(near, far)
    first.close()


def test_one_full_step_with_momentum_is_the_heavy_ball(problem: LeastSquares) -> None:
    lr, beta = 0.3 / problem.smoothness(), 0.6
    algorithm = eq.FedAvg(lr=lr, batch=FULL, server_optimizer={"kind": "sgd", "beta1": beta})
    sim = least_squares(problem, algorithm, rounds=8)
    x, y = np.concatenate(problem.x), np.concatenate(problem.y)
    w, before = np.zeros(problem.features), np.zeros(problem.features)
    for _ in range(8):
        w, before = w - lr * 2 * x.T @ (x @ w - y) / len(x) + beta * (w - before), w
    np.testing.assert_allclose(sim.server.w.numpy(), w, rtol=1e-10)


def test_an_interrupted_round_is_forgotten() -> None:
    whole = finished(stepping("fedavg", "adam"))
    sim = simulation(stepping("fedavg", "adam"), rounds=3)
    sim.advance()
    server, done, snapshot = sim.server, sim.done, sim.pipeline.snapshot()
    sim.advance()
    sim.pipeline.rollback(snapshot)  # as `advance` does when Ctrl-C was pressed
    sim.server, sim.done = server, done
    sim.advance()
    sim.advance()
    sim.close()
    assert torch.equal(sim.server.w, whole.server.w)


def test_resumed_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"module": normalised(), "checkpoint_every": 2}
    algorithm = stepping("ditto", "yogi")
    whole = finished(algorithm, folder=tmp_path / "whole", rounds=5, **options)
    part = simulation(algorithm, folder=tmp_path / "part", rounds=5, **options)
    for _ in range(3):
        part.advance()
    part.close()
    resumed = simulation(algorithm, folder=tmp_path / "part", rounds=5, new=False, **options)
    resumed.resume()
    assert resumed.done == 2
    assert resumed.pipeline.server_step.memory["w"].keys() == {"m", "v"}
    resumed.run()
    assert torch.equal(resumed.server.w, whole.server.w)
    assert torch.equal(resumed.server.buffers, whole.server.buffers)
    assert (tmp_path / "part/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_a_deployment_resumes_with_its_memory(tmp_path: Path) -> None:
    given = small_mlp(), table(eq.FedRep(lr=0.1, batch=4, server_optimizer="adagrad"))
    for rounds in (2, 3):
        app, grid = deployed(tmp_path / "app", classification(3), *given, rounds=rounds)
        resumed = run(app, grid, tmp_path / "out", resume=rounds == 3)
    app, grid = deployed(tmp_path / "whole", classification(3), *given, rounds=3)
    whole = run(app, grid, tmp_path / "whole-out")
    assert torch.equal(resumed.server.phi, whole.server.phi)
    assert resumed.lines[-1]["personal"] == whole.lines[-1]["personal"]


def test_a_noised_mean_is_stepped_like_any_other() -> None:
    uploads = UploadSettings(privacy=Privacy(clip=1.0, sigma=0.1, where="central"))
    ends = []
    for lr in (1.0, 2.0):
        sim = simulation(stepping("fedavg", {**PLAIN, "lr": lr}), uploads=uploads)
        before = sim.server.w
        sim.advance()
        ends.append(sim.server.w - before)
        sim.close()
    torch.testing.assert_close(ends[1], 2 * ends[0], rtol=1e-9, atol=1e-12)


def test_a_field_that_is_not_there_is_named() -> None:
    class Mine(eq.FedAvg):
        averaged = ("theta",)

    with pytest.raises(EquipoiseError, match=r"Mine.averaged names 'theta', .* it has w"):
        simulation(Mine())
