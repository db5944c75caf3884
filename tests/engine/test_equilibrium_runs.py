"""Equilibrium layers in a run: every algorithm, both engines, warm starts that change nothing but the time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.callbacks.base import Callback
from equipoise.callbacks.callback_list import CallbackList
from equipoise.data.federation import Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.equilibrium import ContractiveLinear, Equilibrium, layers
from equipoise.errors import EquipoiseError, RunFailed
from equipoise.executors.base import FIXED_POINTS, ClientJob
from equipoise.models import MODELS
from equipoise.models.base import BodyAndHead
from equipoise.runs.launch import reopen
from equipoise.state import State
from tests.support.commands import equipoise_command
from tests.support.flower_memory import deployed, in_both_engines, same, table
from tests.support.flower_memory import run as deployment
from tests.support.marks import slow_except
from tests.support.problems import classification, metrics, registered, simulation

DEQ = [name for name in MODELS if name.startswith("deq-")]
SMALL: dict[str, dict[str, Any]] = {
    "deq-mlp": {"width": 6, "hidden": 5},
    "deq-resnet-s": {"channels": 8, "inner": 16, "hidden": (6, 5)},
    "deq-resnet-m": {"channels": 16, "inner": 8, "hidden": (6, 5)},
    "deq-residual": {"channels": 8, "inner": 8, "blocks": 2},
    "deq-cnn": {"channels": 8, "layers": 2},
    "deq-transformer": {"width": 8, "heads": 2},
}


class Dense(nn.Module):
    def __init__(self, kappa: float | None = 0.9):
        super().__init__()
        self.b: nn.Module = nn.Linear(7, 7) if kappa is None else ContractiveLinear(7, 7, kappa)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.relu(self.b(z) + x)


def small(kappa: float | None = 0.9, **given: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = {"tol": 1e-4, "limit": 50, "gradient": "implicit", **given}
        return BodyAndHead(nn.Sequential(nn.Linear(5, 7), Equilibrium(Dense(kappa), **settings)), nn.Linear(7, 3))


def images(name: str) -> Federation:
    rng = np.random.default_rng(0)
    clients = []
    for n in (2, 5):
        x = rng.integers(0, 4, (n, 6)).astype("uint8") if name == "deq-transformer" else rng.normal(size=(n, 1, 8, 8))
        y = rng.integers(0, 4, (n, 6) if name == "deq-transformer" else n)
        clients.append(dict.fromkeys(("train", "validation", "test"), (x, y)))
    return from_clients(clients)


def with_head(algorithm: str, name: str) -> str:
    """A model whose head is a linear layer, or whose samples have one label, where the algorithm needs that."""
    requires = registered(algorithm).requires
    return "deq-mlp" if name == "deq-transformer" and (requires.linear_head or requires.labels) else name


PAIRS = [(algorithm, with_head(algorithm, DEQ[(k + 1) % len(DEQ)])) for k, algorithm in enumerate(ALGORITHMS)]
PAIRS = [(algorithm, name) for algorithm, name in PAIRS if algorithm != "fedcr"]  # it has models of its own kind
PAIRS += [("fedeq", name) for name in DEQ if ("fedeq", name) not in PAIRS]


@pytest.mark.parametrize(("method", "name"), slow_except(PAIRS, *PAIRS[::5], several=True))
def test_every_algorithm_trains_an_equilibrium_model_and_fedeq_all_of_them(method: str, name: str) -> None:
    algorithm = registered(method)
    shape = (6,) if name == "deq-transformer" else (1, 8, 8)
    module = MODELS[name](**SMALL.get(name, {})).build(shape, 4)
    algorithm = algorithm.model_copy(update={"epochs": 1})
    run = simulation(algorithm, images(name), module, dtype="float32", rounds=1, participation=1.0)
    run.run()
    (line,) = run.lines
    assert line["left_out"] == 0
    assert 1 <= line["solver_iterations"] <= 20
    assert 0 <= line["unconverged"] <= 1
    for kind in ("personal", "global"):
        if kind in line:
            assert np.isfinite(line[kind]["loss"])


def last_run(algorithm: Algorithm, folder: Path | None = None, **given: Any) -> Simulation:
    module = small(**{k: given.pop(k) for k in ("warm_start", "tol", "kappa", "limit") if k in given})
    run = simulation(algorithm, module=module, folder=folder, **given)
    run.run()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("warm_start", ["off", "update", "client"])
def test_workers_and_interruptions_change_nothing(warm_start: str, tmp_path: Path) -> None:
    algorithm = ALGORITHMS["fedrep"](lr=0.05, epochs=2, batch=8)
    one = last_run(algorithm, tmp_path / "one", rounds=4, checkpoint_every=2, warm_start=warm_start, workers=1)
    many = last_run(algorithm, rounds=4, warm_start=warm_start, workers=4)
    assert many.lines == one.lines
    broken = simulation(
        algorithm, module=small(warm_start=warm_start), folder=tmp_path / "broken", rounds=4, checkpoint_every=2
    )
    for _ in range(3):
        broken.advance()
    broken.close()
    resumed = simulation(
        algorithm,
        module=small(warm_start=warm_start),
        folder=tmp_path / "broken",
        rounds=4,
        checkpoint_every=2,
        new=False,
    )
    resumed.resume()
    assert resumed.done == 2
    resumed.run()
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "one")
    summaries = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("one", "broken")]
    for key in ("solver_iterations", "unconverged", "personal"):
        assert summaries[0][key] == summaries[1][key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "warm_start"),
    [("fedavg", "off"), ("fedavg", "client"), ("fedrep", "update"), ("fedrep", "client"), ("ditto", "client")],
)
def test_engines_agree_on_equilibria(name: str, warm_start: str, tmp_path: Path) -> None:
    algorithm = ALGORITHMS[name](lr=0.05, epochs=2, batch=4)
    federation, module = classification(), small(warm_start=warm_start)
    over_flower, simulated = in_both_engines(tmp_path, algorithm, federation, module, participation=0.5)
    for ours, theirs in zip(over_flower.lines, simulated.lines, strict=True):
        same(ours, theirs)
        assert list(ours) == list(theirs)
    for key in ("solver_iterations", "unconverged", "gradient_iterations", "gradients_unconverged"):
        same(over_flower.summary()[key], simulated.summary()[key])


@pytest.mark.slow
def test_warm_starts_save_iterations_and_lead_to_the_same_place() -> None:
    """The tighter the tolerance, the less it matters where a solve began."""
    algorithm = ALGORITHMS["fedrep"](lr=0.05, epochs=3, head_epochs=2, batch=8)
    runs = {
        kind: last_run(algorithm, rounds=2, participation=1.0, tol=1e-9, limit=200, warm_start=kind)
        for kind in ("off", "update", "client")
    }
    for kind in ("update", "client"):
        for name, t in runs["off"].server.items():
            torch.testing.assert_close(runs[kind].server[name], t, rtol=1e-6, atol=1e-7)
    used = {kind: run.summary()["solver_iterations"] for kind, run in runs.items()}
    assert used["client"] < used["update"] < 0.8 * used["off"]


def test_fixed_points_are_kept_with_the_client_only_where_they_are_to_be() -> None:
    algorithm = ALGORITHMS["fedavg"](lr=0.05, batch=4)
    for kind in ("off", "update"):
        run = last_run(algorithm, rounds=1, participation=1.0, warm_start=kind)
        assert not [k for k in run.store.get(3) if k.startswith(FIXED_POINTS)]
    run = last_run(algorithm, rounds=1, participation=1.0, warm_start="client")
    lengths = run.federation.train.lengths
    for who in range(len(run.federation)):
        state = run.store.get(who)
        known = state[FIXED_POINTS + "0.known"]
        assert len(known) == lengths.max()  # one length for all, so that states can lie in one table
        assert known.tolist() == [k < lengths[who] for k in range(lengths.max())]
        assert state[FIXED_POINTS + "0.z"].shape == (lengths.max(), 7)
    before = run.schema
    assert before.parameters_shared == run.task.space.size
    assert run.counters.bytes_up == len(run.federation) * (run.task.space.size + 1) * 8  # they never leave


@pytest.mark.slow
def test_weights_are_projected_after_every_step(one_of_a_kind: Algorithm) -> None:
    """Far larger steps than would keep them there: ‖B‖_∞ <= κ holds for what is trained, shared and kept."""
    algorithm = one_of_a_kind.model_copy(update={"lr": 0.7, "clip": 1.0})
    run = last_run(algorithm, rounds=3, participation=1.0, kappa=0.5)
    result = eq.api.Result(run)
    own = "personal" in run.lines[-1] and not result.looks_up
    modules = [result.personal(who) for who in range(3)] if own else []
    modules += [result.global_model()] if "global" in run.lines[-1] else []
    assert modules
    moved = False
    for module in modules:
        weight = module.body[1].f.b.weight.detach()
        assert float(torch.linalg.matrix_norm(weight, ord=torch.inf)) <= 0.5 * (1 + 1e-9)
        moved |= not torch.equal(weight, small(0.5).double().body[1].f.b.weight.detach())
        assert not module.body[1].quiet  # outside of a run it speaks for itself
    assert moved


def test_a_client_whose_data_grew_goes_on() -> None:
    """Between rounds of a deployment, the tables kept with the client's state may have become too short."""
    run = simulation(ALGORITHMS["fedavg"](lr=0.05, batch=4), module=small(warm_start="client"))
    state = run.store.get(5)
    short = State({k: t[:5] for k, t in state.items() if k.startswith(FIXED_POINTS)})
    (done,) = run.executor.train(1, [ClientJob(5, short, run.server)], lambda: False)
    assert done.client[FIXED_POINTS + "0.known"].tolist() == [True] * 28
    run.close()


def test_any_module_may_be_projected() -> None:
    class Boxed(nn.Linear):
        def project_(self) -> None:
            self.weight.clamp_(-0.1, 0.1)

    module = BodyAndHead(nn.Sequential(Boxed(5, 4), nn.Tanh()), nn.Linear(4, 3))
    run = simulation(ALGORITHMS["fedavg"](lr=0.5, batch=4), module=module, rounds=2)
    run.run()
    assert eq.api.Result(run).global_model().body[0].weight.abs().max() <= 0.1 + 1e-12


@pytest.mark.parametrize("name", ["deq-residual", "deq-mlp"])
def test_a_projected_model_that_diverges_is_told_like_any_other(name: str) -> None:
    module = MODELS[name](**SMALL[name], contraction=True).build((1, 8, 8), 4)
    algorithm = ALGORITHMS["fedavg"](lr=1e30, batch=2)
    run = simulation(algorithm, images(name), module, dtype="float32", rounds=2, participation=1.0)
    with pytest.raises(RunFailed, match="every client's update has NaN or infinite numbers"):
        run.run()


class Heard(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


def test_a_run_whose_layer_does_not_converge_says_so_once() -> None:
    run = simulation(ALGORITHMS["fedavg"](lr=0.01, batch=4), module=small(tol=1e-9, limit=3), rounds=4)
    heard = Heard()
    run.callbacks = CallbackList([heard])
    run.run()
    (text,) = heard.texts
    assert text.startswith("round 1: the equilibrium layer 'body.1' did not converge in")
    assert "after 3 iterations the residual is up to" in text
    assert "should be 1e-09" in text
    assert run.summary()["unconverged"] == 1.0
    assert run.summary()["solver_iterations"] == 3.0


@pytest.mark.slow
def test_a_run_that_diverges_says_which_layer_and_stops() -> None:
    """Without a projection and with huge steps, f leaves the numbers: no NaN is ever handed on."""
    module = small(None, limit=500)
    run = simulation(ALGORITHMS["fedavg"](lr=1e4, batch=4), module=module, rounds=4, participation=1.0)
    heard = Heard()
    run.callbacks = CallbackList([heard])
    with pytest.raises(RunFailed, match=r"the equilibrium layer 'body.1' (diverged|did not converge)"):
        run.run()
    assert any("left out" in text and "; the equilibrium layer 'body.1'" in text for text in heard.texts)
    for t in run.server.values():
        assert t.isfinite().all()


def test_a_stack_is_refused_in_words() -> None:
    with pytest.raises(EquipoiseError, match="because the model has equilibrium layers"):
        simulation(ALGORITHMS["fedavg"](), module=small(), mode="stacked")
    task = simulation(ALGORITHMS["fedavg"](), module=small()).task
    assert task.mode() == "threads"
    contractive = BodyAndHead(nn.Sequential(ContractiveLinear(5, 5, 0.5)), nn.Linear(5, 3))
    with pytest.raises(EquipoiseError, match="projected after every step"):
        simulation(ALGORITHMS["fedavg"](), module=contractive, mode="stacked")


@pytest.mark.slow
def test_a_model_that_went_through_a_file_predicts_the_same(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        'rounds = 1\n[data]\nname = "digits-by-writer"\n[model]\nname = "deq-mlp"\nwidth = 8\nhidden = 4\n'
        '[algorithm]\nname = "fedper"\nsteps = 1\n'
    )
    done = equipoise_command("run", "e.toml", "--out", "run", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = equipoise_command("export", "run", "--client", "0", "--out", "m.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    module = eq.load_model(tmp_path / "m.safetensors")
    ((name, layer),) = layers(module)
    assert name == "body.2"
    assert layer.options.gradient == "jacobian-free"
    result, _ = reopen(tmp_path / "run")
    x = torch.rand(3, 1, 28, 28)
    assert torch.equal(module(x), result.personal(0)(x))


@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_solves_that_are_performed_in_full_are_counted_without_a_warning(engine: str, tmp_path: Path) -> None:
    module = small(tol=0.0, counted_tol=1e-2, limit=3)
    heard, algorithm = Heard(), ALGORITHMS["fedavg"](lr=0.01, batch=4)
    if engine == "simulation":
        run: Any = simulation(algorithm, module=module, rounds=2)
        run.callbacks = CallbackList([heard])
        run.run()
    else:
        app, grid = deployed(tmp_path / "app", classification(), module, table(algorithm), rounds=2, participation=0.5)
        app.callbacks = (heard,)
        run = deployment(app, grid, tmp_path / "out")
    assert not [text for text in heard.texts if "converge" in text]
    summary = run.summary()
    assert summary["solver_iterations"] == summary["gradient_iterations"] == 3
    assert 0 < summary["unconverged"] < 1
