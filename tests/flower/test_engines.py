"""Both engines give the same numbers, for every registered algorithm."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import nn

from equipoise.algorithms import ALGORITHMS
from equipoise.attacks import ATTACKS
from equipoise.config.uploads import UploadSettings
from equipoise.errors import EquipoiseError, RunFailed
from equipoise.flower import App
from equipoise.flower.protocol import Answer, open_message
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import REDUCERS
from equipoise.registry import choose
from tests.support.flower_memory import WALL, deployed, in_both_engines, run, same, table
from tests.support.marks import slow_except
from tests.support.problems import EVERY, KINDS, classification, registered, simulation, small_mlp

CASES = [*((name, 0.5) for name in EVERY), *((name, 1.0) for name in KINDS)]


@pytest.mark.parametrize(("name", "participation"), slow_except(CASES, *((name, 0.5) for name in KINDS), several=True))
def test_engines_agree(name: str, participation: float, tmp_path: Path) -> None:
    algorithm = registered(name)
    federation = classification().holding_out(0.2, 0)
    over_flower, simulated = in_both_engines(tmp_path, algorithm, federation, small_mlp(), participation=participation)
    assert len(simulated.lines) == 3
    for ours, theirs in zip(over_flower.lines, simulated.lines, strict=True):
        same(ours, theirs)
    ours, theirs = over_flower.summary(), simulated.summary()
    same({k: ours[k] for k in theirs if k not in WALL}, {k: v for k, v in theirs.items() if k not in WALL})
    assert (tmp_path / "flower" / "clients.csv").exists()
    assert over_flower.transport.refused == {}


@pytest.mark.parametrize(
    ("name", "attack", "reducer"),
    [
        ("flame", {"name": "sign-flip"}, "weighted-mean"),
        ("flame", {"name": "label-poison"}, "multi-krum"),
        ("fedrep", {"name": "gaussian"}, "median"),
        ("fedavg", {"name": "weight-inflation", "inner": {"name": "min-max", "direction": "unit"}}, "weighted-mean"),
        ("ditto", {"name": "label-flip", "mode": "targeted", "source": 0, "target": 2}, "weighted-mean"),
        ("flame", {"name": "free-rider"}, "weighted-mean"),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else value,
)
def test_engines_agree_under_attack(name: str, attack: dict, reducer: str, tmp_path: Path) -> None:
    federation, algorithm = classification().holding_out(0.2, 0), ALGORITHMS[name](lr=0.05, batch=4)
    table = {**attack, "fraction": 0.4}
    between = UploadSettings(choose(ATTACKS, table, "attack")[1], REDUCERS[reducer]())
    tables = {"attack": table, "reducer": {"name": reducer}}
    over_flower, simulated = in_both_engines(
        tmp_path, algorithm, federation, small_mlp(), between, tables, participation=0.7
    )
    assert len(over_flower.pipeline.malicious) == 2
    ours, theirs = over_flower.summary(), simulated.summary()
    same({k: ours[k] for k in theirs if k not in WALL}, {k: v for k, v in theirs.items() if k not in WALL})
    for field, t in simulated.server.items():
        np.testing.assert_allclose(over_flower.server[field], t, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "flame", "fedreco"])
@pytest.mark.parametrize("where", ["local", "central"])
def test_engines_agree_on_what_is_clipped(name: str, where: str, tmp_path: Path) -> None:
    """Noise is nobody's to foresee in a deployment; without it both engines send the same, weights apart."""
    federation, algorithm = classification(), ALGORITHMS[name](lr=0.1, batch=4)
    privacy = {"clip": 0.05, "sigma": 0.0, "where": where}
    uploads, tables = UploadSettings(privacy=Privacy(**privacy)), {"privacy": privacy}
    over_flower, simulated = in_both_engines(
        tmp_path, algorithm, federation, small_mlp(), uploads, tables, participation=1.0
    )
    for field, t in simulated.server.items():
        np.testing.assert_allclose(over_flower.server[field], t, rtol=1e-9, atol=1e-12)
    found = over_flower.summary()["privacy"]
    assert found["epsilon_run"] is None  # no noise
    assert found["releases"] == 3
    assert found["not_covered"] == ["scores", "numbers of samples"]


def test_the_noise_of_a_deployment_cannot_be_computed_from_its_seed(tmp_path: Path) -> None:
    federation, algorithm = classification(), ALGORITHMS["fedavg"](lr=0.1, batch=4)
    ends = []
    for name in "ab":
        options = {"rounds": 2, "participation": 1.0, "privacy": {"clip": 0.1, "sigma": 0.01}}
        app, grid = deployed(tmp_path / name, federation, small_mlp(), table(algorithm), **options)
        ends.append(run(app, grid, tmp_path / f"{name}-run").server.w.numpy())
    assert not np.array_equal(*ends)
    # The difference is that of noise on six messages in two rounds, not more.
    assert 0.2 < np.std(ends[0] - ends[1]) / (0.01 * np.sqrt(2 * 2 / 6)) < 5


def small_mlp_size() -> int:
    return sum(p.numel() for p in small_mlp().parameters())


@pytest.mark.slow
def test_what_was_asked_for_counts_though_the_server_failed(tmp_path: Path) -> None:
    """Answers that are lost have left the client all the same; asked again, it says the same again."""
    federation, algorithm = classification(3), ALGORITHMS["fedavg"](lr=0.1, batch=4)
    options = {"rounds": 2, "participation": 1.0, "privacy": {"clip": 0.1, "target_epsilon": 5.0}}
    options["deploy"] = {"minimum": 3, "attempts": 2, "deadline": 3.0, "evaluate": False}
    app, grid = deployed(tmp_path / "app", federation, small_mlp(), table(algorithm), **options)
    up = {"up.w": ((small_mlp_size(),), torch.float64)}
    lost = []

    def lose(order: Message, reply: Message) -> list[Message]:
        if open_message(reply, Answer, up)[0].trained == 1 and len(lost) < 2:
            lost.append(reply)
            return []
        return [reply]

    grid.nodes[100].tamper = lose
    with pytest.raises(RunFailed, match="too few updates"):
        run(app, grid, tmp_path / "out")
    done = run(app, grid, tmp_path / "out", resume=True)
    answers = [open_message(m, Answer, up) for m in grid.nodes[100].sent]
    trained = [(answer.trained, tensors) for answer, tensors in answers if answer.trained]
    assert [round for round, _ in trained] == [1, 1, 1, 2]
    assert all(torch.equal(tensors["up.w"], trained[0][1]["up.w"]) for round, tensors in trained if round == 1)
    assert done.pipeline.ledger.released == dict.fromkeys(federation.names, 4)
    assert done.summary()["privacy"]["epsilon_run"] > 5.0
    sent = json.loads((tmp_path / "app" / "state-0" / "releases.json").read_text())["sent"]
    assert len(sent) == 2  # two different messages, whatever was asked for


def test_clients_that_never_come_do_not_count(tmp_path: Path) -> None:
    """FLAME's mean is over the clients that were there when it began, not over those that were waited for."""
    federation, algorithm = classification(4), ALGORITHMS["flame"](lr=0.05, batch=4)
    tables = {"deploy": {"clients": 7, "wait": 0.5}}
    over_flower, simulated = in_both_engines(
        tmp_path, algorithm, federation, small_mlp(), tables=tables, participation=1.0
    )
    assert over_flower.start.clients == 4
    np.testing.assert_allclose(over_flower.server.w, simulated.server.w, rtol=1e-9, atol=1e-12)


def test_engines_agree_where_clients_count_by_their_samples(tmp_path: Path) -> None:
    federation, algorithm = classification(), ALGORITHMS["flame"](lr=0.05, batch=4, alpha="samples")
    over_flower, simulated = in_both_engines(tmp_path, algorithm, federation, small_mlp(), participation=0.5)
    assert over_flower.start.samples == federation.train.lengths.sum()
    np.testing.assert_allclose(over_flower.server.w, simulated.server.w, rtol=1e-9, atol=1e-12)


def test_engines_agree_on_a_training_recipe(tmp_path: Path) -> None:
    recipe = {"optimizer": "adamw", "weight_decay": 0.1, "drop_last": True}
    schedule = {"kind": "cosine", "warmup": 1, "final": 0.1}
    algorithm = ALGORITHMS["ditto"](lr=0.05, batch=4, schedule=schedule, **recipe)
    over_flower, simulated = in_both_engines(tmp_path, algorithm, classification(), small_mlp(), participation=0.5)
    np.testing.assert_allclose(over_flower.server.w, simulated.server.w, rtol=1e-9, atol=1e-12)
    rates = [line["lr"] for line in over_flower.lines]
    assert rates == [line["lr"] for line in simulated.lines]
    assert rates[0] == 0.05
    assert rates[-1] == pytest.approx(0.005)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_engines_agree_on_a_model_with_buffers(buffers: str, tmp_path: Path) -> None:
    """BatchNorm's statistics are averaged, or stay with the client and go on from round to round."""
    federation = classification()
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    algorithm = ALGORITHMS["ditto"](lr=0.05, batch=5, buffers=buffers)
    over_flower, simulated = in_both_engines(tmp_path, algorithm, federation, module, participation=0.5)
    assert ("buffers" in over_flower.server) == (buffers == "average")
    for ours, theirs in zip(over_flower.lines, simulated.lines, strict=True):
        same(ours, theirs)


@pytest.mark.parametrize("where", ["app", "experiment"])
def test_engines_agree_on_a_head_of_patterns(where: str, tmp_path: Path) -> None:
    """The head of the user's own model is given to the app, that of a named model is a setting of it."""
    federation, algorithm, head = classification(4), ALGORITHMS["fedrep"](lr=0.05, batch=4), ["*.bias", "head"]
    model = {"model": {"name": "mlp", "hidden": [4], "head": head}}
    module = small_mlp() if where == "app" else None
    app, grid = deployed(
        tmp_path / "app", federation, module, table(algorithm), participation=1.0, **({} if module else model)
    )
    app.own["head"] = head if module else "head"
    over_flower = run(app, grid, tmp_path / "flower")
    assert over_flower.task.space.body_size == (40 if module else 20)
    simulated = simulation(algorithm, federation, app.plan.module(), head=head, participation=1.0, rounds=3)
    simulated.run()
    np.testing.assert_allclose(over_flower.server.phi, simulated.server.phi, rtol=1e-9, atol=1e-12)


def test_a_client_that_keeps_other_parameters_is_refused(tmp_path: Path) -> None:
    """With FedAvg messages have equal sizes, whatever the head is; but their numbers mean other parameters."""
    federation, algorithm = classification(3), ALGORITHMS["fedavg"](lr=0.05, batch=4)
    app, grid = deployed(
        tmp_path / "app", federation, small_mlp(), table(algorithm), deploy={"clients": 3, "wait": 1.0}
    )
    grid.app = App(tmp_path / "app" / "app.py", model=small_mlp, head="*.bias")
    with pytest.raises(RunFailed):
        run(app, grid, tmp_path / "flower")
    assert "has a different model from the server" in (tmp_path / "flower" / "events.jsonl").read_text()


def test_an_app_for_a_method_with_heads_needs_one(tmp_path: Path) -> None:
    federation, module = classification(3), nn.Sequential(nn.Linear(5, 3))
    app, _ = deployed(tmp_path / "app", federation, module, {"name": "fedper"})
    with pytest.raises(EquipoiseError, match="FedPer keeps the model's head on the client; name the submodule"):
        app.plan.task()
    app.own["head"] = "0.bias"
    assert app.plan.task().space.body_size == 15
