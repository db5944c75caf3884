"""Runs on an accelerator give the numbers of the CPU; a stand-in takes the place of the accelerator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equipoise import torch_device
from equipoise.algorithms import ALGORITHMS, CFL, Ditto, FedAvg, FedReCo, Flame, LpProj
from equipoise.algorithms.base import Algorithm
from equipoise.attacks import ATTACKS, SignFlip
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.errors import Interrupted
from equipoise.models import MODELS
from equipoise.privacy.mechanisms import Privacy
from equipoise.runs.similarity import measure
from equipoise.runs.trained import SimulatedRun
from equipoise.state import State
from tests.algorithms.test_contract import comparable
from tests.support import problems
from tests.support.marks import slow_except
from tests.support.problems import (
    IN_MODES,
    KINDS,
    classification,
    image_module,
    metrics,
    registered,
    simulation,
)
from tests.support.reducers import IN_RUNS
from tests.support.stand_in import load

QUICK = [(name, "threads") for name in KINDS]


def ran(algorithm: Algorithm, device: str, **options: Any) -> Simulation:
    run = simulation(algorithm, device=device, **{"rounds": 2, **options})
    run.run()
    return run


def same_states(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, value in comparable(one).items():
        torch.testing.assert_close(comparable(other)[name].cpu(), value.cpu(), rtol=1e-9, atol=1e-9)


def same_runs(one: Simulation, other: Simulation) -> None:
    same_states(one.server, other.server)
    for who in range(len(one.federation)):
        same_states(one.store.get(who), other.store.get(who))
    assert one.counters.sums() == other.counters.sums()
    for kind, table in one.scores.tables().items():
        np.testing.assert_allclose(other.scores.tables()[kind], table, rtol=1e-9, atol=1e-9)


def same_on(device: str, algorithm: Algorithm, **options: Any) -> Simulation:
    """Run on a device and on the CPU, compare, and return the run on the device."""
    there = ran(algorithm, device, **options)
    same_runs(ran(algorithm, "cpu", **options), there)
    assert {t.device.type for t in there.server.values()} <= {device}
    held = [t for who in range(len(there.federation)) for t in there.store.get(who).values()]
    assert {t.device.type for t in held} <= {"cpu"}
    return there


@pytest.mark.parametrize(("name", "mode"), slow_except(IN_MODES, *QUICK, ("ditto", "stacked"), several=True))
def test_every_algorithm_gives_the_numbers_of_the_cpu(name: str, mode: str, stand_in: str) -> None:
    same_on(stand_in, registered(name), mode=mode)


@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize(
    "algorithm",
    [
        CFL(lr=0.1, batch=4, eps1=100.0, eps2=1e-9, quiet=0),
        FedReCo(lr=0.1, batch=4, split=("body.encoder", "body"), variance_reduction="partial"),
        LpProj(lr=0.1, batch=4, d_sub=7, local_rounds=2, inner_steps=2),
        Ditto(lr=0.1, batch=4, optimizer="adam", clip=0.1),
        FedAvg(lr=0.1, steps=7, batch=4, momentum=0.5, weight_decay=0.1),
    ],
    ids=["groups", "terms", "projections", "adam", "momentum"],
)
def test_branches_that_few_settings_reach_do_too(algorithm: Algorithm, mode: str, stand_in: str) -> None:
    same_on(stand_in, algorithm, mode=mode, rounds=3)


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_gives_the_numbers_of_the_cpu(name: str, stand_in: str) -> None:
    attack = ATTACKS[name](fraction=0.4)
    pictures = {"federation": problems.images(), "module": image_module()} if attack.success() else {}
    same_on(stand_in, registered("ditto"), uploads=UploadSettings(attack), participation=1.0, **pictures)


@pytest.mark.parametrize("algorithm", [FedAvg(lr=0.1, batch=4), Flame(lr=0.1, batch=4)], ids=["round", "last"])
@pytest.mark.parametrize("name", IN_RUNS)
def test_every_reducer_gives_the_numbers_of_the_cpu(name: str, algorithm: Algorithm, stand_in: str) -> None:
    uploads = UploadSettings(SignFlip(clients=("client-1",)), IN_RUNS[name])
    same_on(stand_in, algorithm, uploads=uploads, participation=1.0)


@pytest.mark.parametrize("name", ["fedavg", "flame", "fedrep"])
@pytest.mark.parametrize("where", ["local", "central"])
def test_privacy_adds_the_noise_of_the_cpu(where: str, name: str, stand_in: str) -> None:
    uploads = UploadSettings(privacy=Privacy(clip=0.5, sigma=0.1, where=where))
    same_on(stand_in, registered(name), uploads=uploads)


def batch_norm_and_dropout() -> nn.Module:
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(body, nn.Linear(8, 3))


@pytest.mark.parametrize("name", KINDS)
def test_models_with_statistics_and_dropout(name: str, stand_in: str) -> None:
    same_on(stand_in, registered(name), module=batch_norm_and_dropout(), head="1")


def images() -> Federation:
    rng = np.random.default_rng(2)
    return from_clients([(rng.normal(size=(9 + 2 * k, 1, 8, 8)), rng.integers(0, 3, 9 + 2 * k)) for k in range(4)])


def convolutions() -> nn.Module:
    torch.manual_seed(2)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(body, nn.Linear(36, 3))


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_convolutions(mode: str, stand_in: str) -> None:
    same_on(stand_in, registered("ditto"), federation=images(), module=convolutions(), head="1", mode=mode)


@pytest.mark.parametrize("data", ["device", "host"])
def test_pixels_that_are_kept_as_bytes(data: str, stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.data.pixels._LEAST", 0)
    rng = np.random.default_rng(5)
    x = [rng.integers(0, 256, (9, 1, 16, 16)).astype(np.float32) / np.float32(255) for _ in range(4)]
    pixels = [(each, rng.integers(0, 3, 9)) for each in x]
    module = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 5), nn.ReLU(), nn.Flatten()), nn.Linear(288, 3))
    for mode in ("threads", "stacked"):
        options: dict[str, Any] = {"federation": from_clients(pixels), "module": module, "head": "1", "mode": mode}
        run = same_on(stand_in, registered("fedavg"), data=data, **options)
        assert run.federation.pixels is not None


def test_random_representations(stand_in: str) -> None:
    torch.manual_seed(3)
    module = MODELS["gaussian-mlp"](latent=4).build((5,), 3)
    same_on(stand_in, registered("fedcr"), module=module)


@pytest.mark.parametrize("warm", ["off", "update", "client"])
@pytest.mark.parametrize("solver", ["anderson", "broyden"])
def test_equilibrium_layers(solver: str, warm: str, stand_in: str) -> None:
    torch.manual_seed(4)
    module = MODELS["deq-mlp"](width=6, hidden=5, solver=solver, warm_start=warm).build((5,), 3)
    same_on(stand_in, registered("fedeq"), module=module, mode="auto")


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_metrics_of_all_samples_together_and_unseen_clients(mode: str, stand_in: str) -> None:
    federation = classification().holding_out(0.3, 0)
    names = ("accuracy", "macro-f1", "calibration-error", "auroc")
    same_on(stand_in, registered("ditto"), federation=federation, mode=mode, metrics=names)


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_data_streamed_from_the_host(mode: str, stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("equipoise.executors.thread_trainer", "equipoise.executors.stacked_trainer"):
        monkeypatch.setattr(f"{module}.STREAMED_BYTES", 2000)  # a few steps at a time
    run = same_on(stand_in, registered("ditto"), mode=mode, data="host")
    assert run.executor.federation.x.device.type == "cpu"
    run = same_on(stand_in, registered("ditto"), mode=mode, data="device")
    assert run.executor.federation.x.device.type == stand_in


def test_auto_stacks_any_model_that_can_be_stacked(stand_in: str) -> None:
    for module, mode in ((convolutions(), "stacked"), (batch_norm_and_dropout(), "threads")):
        federation = images() if mode == "stacked" else classification()
        run = simulation(registered("fedavg"), federation, module, head="1", mode="auto", workers=0, device=stand_in)
        run.close()
        assert run.mode == mode
        assert run.executor.workers == 1


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_cka_is_that_of_the_cpu(name: str, stand_in: str) -> None:
    def similarity(device: str) -> np.ndarray:
        return measure(SimulatedRun(ran(registered(name), device)), "run", 20, lambda done, all: None).values

    np.testing.assert_allclose(similarity(stand_in), similarity("cpu"), rtol=1e-9)


@pytest.fixture
def no_float64(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The stand-in as a device without float64, such as mps."""
    monkeypatch.setattr(torch_device, "_NO_FLOAT64", frozenset({stand_in}))
    load().set_float64(False)
    yield stand_in
    load().set_float64(True)


@pytest.mark.parametrize("name", slow_except(ALGORITHMS, *KINDS))
def test_every_algorithm_runs_on_a_device_without_float64(name: str, no_float64: str) -> None:
    there, here = (ran(registered(name), device, dtype="float32") for device in (no_float64, "cpu"))
    assert there.server.finite()
    if name == "shared-least-squares":  # with fewer samples than coefficients, what remains of X'X is rounding there
        return
    for field, value in here.server.items():
        torch.testing.assert_close(there.server[field].cpu(), value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", IN_RUNS)
def test_every_reducer_runs_on_a_device_without_float64(name: str, no_float64: str) -> None:
    uploads = UploadSettings(SignFlip(clients=("client-1",)), IN_RUNS[name])
    for algorithm in (FedAvg(lr=0.1, batch=4), Flame(lr=0.1, batch=4)):
        options: dict[str, Any] = {"uploads": uploads, "participation": 1.0, "dtype": "float32"}
        there, here = (ran(algorithm, device, **options) for device in (no_float64, "cpu"))
        for field, value in here.server.items():
            torch.testing.assert_close(there.server[field].cpu(), value, rtol=1e-2, atol=1e-3)


def test_noise_and_similarity_on_a_device_without_float64(no_float64: str, tmp_path: Path) -> None:
    for name, where in (("fedavg", "local"), ("flame", "central")):
        uploads = UploadSettings(privacy=Privacy(clip=0.5, sigma=0.1, where=where))
        options: dict[str, Any] = {"algorithm": registered(name), "uploads": uploads, "dtype": "float32", "rounds": 4}
        left_after(2, tmp_path / name, "killed", device="cpu", checkpoint_every=2, **options)
        resumed = simulation(folder=tmp_path / name, new=False, device=no_float64, checkpoint_every=2, **options)
        resumed.resume()
        resumed.run()
        here = ran(device="cpu", **options)
        for field, value in here.server.items():
            torch.testing.assert_close(resumed.server[field].cpu(), value, rtol=1e-3, atol=1e-4)
    run = ran(registered("ditto"), no_float64, dtype="float32", metrics=("accuracy", "calibration-error", "auroc"))
    assert np.isfinite(measure(SimulatedRun(run), "run", 20, lambda done, all: None).values).all()


def left_after(done: int, folder: Path, how: str, **options: Any) -> None:
    """A run that ends without being finished: interrupted by the user, or as if it had been killed."""
    run = simulation(folder=folder, **options)
    if how == "killed":
        while run.done < done:
            run.advance()
        run.close()
        return
    log = run.log

    def watched(line: dict[str, Any], timing: dict[str, Any]) -> None:
        log(line, timing)
        if line["round"] == done:
            run.interrupted.set()

    run.log = watched  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        run.run()


@pytest.mark.parametrize("how", ["killed", "interrupted"])
@pytest.mark.parametrize(("name", "mode"), [("ditto", "stacked"), ("flame", "threads"), ("learn2pfed", "threads")])
def test_resumed_runs_end_with_the_same_bytes(name: str, mode: str, how: str, stand_in: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 5, "checkpoint_every": 2, "mode": mode}
    privacy = UploadSettings(privacy=Privacy(clip=0.5, sigma=0.1, where="central" if name == "flame" else "local"))
    options |= {"algorithm": registered(name), "uploads": privacy if name != "learn2pfed" else None}
    whole = simulation(folder=tmp_path / "whole", device=stand_in, **options)
    whole.run()
    left_after(3, tmp_path / "left", how, device=stand_in, **options)
    for device in (stand_in, "cpu"):  # on the CPU the last round is done already, and only the states are read
        resumed = simulation(folder=tmp_path / "left", new=False, device=device, **options)
        resumed.resume()
        assert resumed.done == (5 if device == "cpu" else 2 if how == "killed" else 3)
        resumed.run()
        assert metrics(tmp_path / "left") == metrics(tmp_path / "whole")
        same_runs(whole, resumed)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_may_be_resumed_on_another_device(name: str, stand_in: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 4, "checkpoint_every": 2, "algorithm": registered(name)}
    whole = simulation(folder=tmp_path / "whole", device="cpu", **options)
    whole.run()
    for first, then in ((stand_in, "cpu"), ("cpu", stand_in)):
        folder = tmp_path / f"from-{first}"
        left_after(2, folder, "killed", device=first, **options)
        resumed = simulation(folder=folder, new=False, device=then, **options)
        resumed.resume()
        assert resumed.done == 2
        resumed.run()
        same_runs(whole, resumed)
