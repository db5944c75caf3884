"""The best models by validation are those of their rounds, in memory, in the run folder, and after a restart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import equipoise as eq
from equipoise.callbacks.base import Line
from equipoise.storage.model_kinds import COLUMNS
from tests.support.callbacks import CLIENTS, Listener, train
from tests.support.problems import classification, small_mlp

NAMES = [f"client-{who}" for who in range(4)]


class Record(eq.Callback):
    """Remembers all models of all rounds, and how they score."""

    affects_results = False

    def on_run_begin(self) -> None:
        self.scores: list[dict[str, float]] = []
        self.shared_scores: list[float] = []
        self.models: list[dict[str, nn.Module]] = []

    def on_evaluation(self, line: Line) -> None:
        self.scores.append(self.run.validation_scores("personal"))
        self.shared_scores.append(line["global"]["validation_accuracy"])
        models = {name: self.run.personal_model(name) for name in self.run.clients}
        self.models.append(models | {"global": self.run.global_model()})

    def best_round(self, name: str) -> int:
        """The first round with the highest score of a client's model, or of the global one."""
        scores = self.shared_scores if name == "global" else [found[name] for found in self.scores]
        return int(np.argmax(scores))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    "algorithm", [eq.Ditto(batch=5, lr=0.3), eq.FedAvgFT(batch=5, lr=0.3)], ids=["ditto", "fedavg-ft"]
)
def test_the_best_model_is_the_model_of_its_round(algorithm: eq.Algorithm, tmp_path: Path) -> None:
    record = Record()
    result = train([record, eq.BestModel()], algorithm=algorithm, out=tmp_path / "run")
    rounds = {name: record.best_round(name) for name in (*NAMES, "global")}
    assert len(set(rounds.values())) > 1  # else any round would do
    for number, name in enumerate(NAMES):
        assert same(result.best(name), record.models[rounds[name]][name])
        assert same(result.best(number), result.best(name))
    assert same(result.best(), record.models[rounds["global"]]["global"])
    written = load_file(tmp_path / "run" / "best" / "personal.safetensors")
    assert torch.equal(written["client-2/0.weight"], result.best(2)[0].weight)
    assert torch.equal(load_file(tmp_path / "run" / "best" / "global.safetensors")["2.bias"], result.best()[2].bias)
    with safe_open(tmp_path / "run" / "best" / "personal.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["rounds"]) == {name: rounds[name] + 1 for name in NAMES}
    # without a folder they are the same
    in_memory = train([eq.BestModel()], algorithm=algorithm)
    assert all(same(in_memory.best(who), result.best(who)) for who in (*NAMES, None))


def test_a_lower_score_is_better_where_the_metric_says_so() -> None:
    rng = np.random.default_rng(1)
    clients = [
        (rng.normal(size=(30, 3)).astype("float32"), rng.normal(size=(30, 1)).astype("float32")) for _ in range(3)
    ]
    lines: list[dict[str, float]] = []

    class Look(eq.Callback):
        def on_evaluation(self, line: Line) -> None:
            assert not self.run.higher_is_better
            lines.append(self.run.validation_scores("personal"))

    torch.manual_seed(0)
    result = eq.train(
        nn.Linear(3, 1),
        clients,
        eq.Ditto(lr=0.3, batch=5),
        loss="squared",
        head=None,
        rounds=6,
        callbacks=[Look(), eq.BestModel(model="personal")],
    )
    federation = result.federation
    for who, name in enumerate(result.clients):
        x, y = federation.gather(torch.from_numpy(federation.validation[who]))
        with torch.no_grad():
            rmse = (result.best(who)(x) - y).square().mean().sqrt().item()
        assert rmse == pytest.approx(min(line[name] for line in lines), rel=1e-5)
    with pytest.raises(eq.EquipoiseError, match="no best global model was kept"):
        result.best()


def test_a_client_without_validation_samples_keeps_its_newest_model() -> None:
    """Client 1 of this problem has none."""
    result = eq.train(
        small_mlp(), classification(), eq.Ditto(lr=0.3, batch=4), rounds=5, participation=1.0, callbacks=["best-model"]
    )
    assert same(result.best("client-1"), result.personal("client-1"))
    columns = result.scores()["personal"][:, COLUMNS.index("validation_metric")]
    assert np.isnan(columns).nonzero()[0].tolist() == [1]


def test_models_that_look_samples_up_do_so_at_their_best() -> None:
    result = eq.train(
        small_mlp(), classification(), eq.KnnPer(lr=0.1, batch=4), rounds=2, callbacks=[eq.BestModel(model="personal")]
    )
    assert type(result.best(0)) is type(result.personal(0))


def test_buffers_that_stay_with_clients_are_part_of_a_personal_model_and_forbid_a_global_one() -> None:
    def normed() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def local(lr: float = 0.01) -> eq.Ditto:
        return eq.Ditto(batch=7, lr=lr, buffers="local")

    record, heard = Record(), Listener()
    with pytest.warns(eq.RunWarning, match="best-model keeps the personal model only: its buffers"):
        result = eq.train(
            normed(), CLIENTS, local(lr=0.3), head=None, rounds=5, callbacks=[record, heard, eq.BestModel()]
        )
    for name in NAMES:
        assert same(result.best(name), record.models[record.best_round(name)][name])
    with pytest.raises(eq.EquipoiseError, match="best-model cannot keep the global model: its buffers"):
        eq.train(normed(), CLIENTS, local(), head=None, rounds=1, callbacks=[eq.BestModel(model="global")])
    averaged = eq.train(normed(), CLIENTS, eq.Ditto(batch=7), head=None, rounds=1, callbacks=[eq.BestModel()])
    assert same(averaged.best(), averaged.global_model())


@pytest.mark.parametrize(
    ("algorithm", "model", "message"),
    [
        (lambda: eq.FedAvg(batch=5), "personal", "keeps personal models, but this method has none"),
        (lambda: eq.Local(batch=5), "global", "keeps the global model, but this method has none"),
    ],
)
def test_a_model_that_does_not_exist_is_said(algorithm: Callable[[], eq.Algorithm], model: Any, message: str) -> None:
    with pytest.raises(eq.EquipoiseError, match=message):
        train([eq.BestModel(model=model)], algorithm=algorithm(), rounds=2)


def test_a_reopened_run_has_them_too(tmp_path: Path) -> None:
    from equipoise.config.experiment import Experiment
    from equipoise.runs.launch import reopen, run
    from tests.support.commands import small

    experiment = Experiment.parse(small(rounds=4, checkpoint_every=1, callbacks=[{"name": "best-model"}]))
    first = run(experiment, tmp_path / "run")
    again, _ = reopen(tmp_path / "run")
    assert all(same(again.best(who), first.best(who)) for who in (0, 1, 2, None))
    with pytest.raises(eq.EquipoiseError, match="no client 7"):
        again.best(7)
    with pytest.raises(eq.EquipoiseError, match=r"no best personal model of 0 was kept; train with callbacks"):
        train([], rounds=1).best(0)
