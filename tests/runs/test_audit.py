"""Audits of finished runs: who is a candidate, what shadow runs train on, and what attacks find where it is known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import nn

from equipoise.algorithms import Ditto, FedAvg, Local
from equipoise.attacks import SignFlip
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.privacy.mechanisms import Privacy
from equipoise.runs.audit import AuditSettings, audit
from equipoise.runs.shadow_runs import Candidates, confidences, shadow_run, without_clients
from tests.support.commands import equipoise_command, one_sentence, small
from tests.support.problems import simulation


def guesses(clients: int = 8, samples: int = 12) -> Federation:
    """Labels that nothing but learning by heart can know."""
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(clients):
        x, y = rng.normal(size=(2 * samples, 30)), rng.integers(0, 3, 2 * samples)
        parts.append({"train": (x[:samples], y[:samples]), "test": (x[samples:], y[samples:])})
    return from_clients(parts)


def finished(algorithm: Any, lr: float = 0.5, **settings: Any) -> Simulation:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Linear(30, 3)
    options = {"rounds": 15, "participation": 1.0, "head": (), "mode": "stacked", **settings}
    run = simulation(algorithm(lr=lr, batch=12), guesses(), module, **options)
    run.run()
    return run


@pytest.fixture(scope="module")
def by_heart() -> Simulation:
    return finished(Local, rounds=40)


@pytest.fixture(scope="module")
def untrained() -> Simulation:
    return finished(FedAvg, lr=1e-30, rounds=1)


def test_candidates_are_as_many_training_as_test_samples_of_each_client(by_heart: Simulation) -> None:
    found = Candidates.draw(by_heart, 40, seed=1)
    for who in range(8):
        own = found.who == who
        assert found.member[own].sum() == (~found.member[own]).sum() == 5
        assert set(found.index[own & found.member]) <= set(by_heart.federation.train[who])
        assert set(found.index[own & ~found.member]) <= set(by_heart.federation.test[who])


def test_shadow_runs_train_on_one_half_of_the_candidates_and_on_all_else(by_heart: Simulation) -> None:
    federation, found = by_heart.federation, Candidates.draw(by_heart, 40, seed=1)
    one, other = found.halves(federation, 0, 0)
    assert (one ^ other).all()
    assert not np.array_equal(one, found.halves(federation, 0, 1)[0])
    for half in (one, other):
        shadow = found.federation(federation, half)
        for who in range(8):
            own, candidates = set(shadow.train[who]), found.index[found.who == who]
            assert len(own) == len(federation.train[who])
            assert own & set(candidates) == set(found.index[(found.who == who) & half])
            assert own - set(candidates) == set(federation.train[who]) - set(candidates)


def test_clients_that_are_left_out_are_not_in_the_shadow_run(untrained: Simulation) -> None:
    fewer = without_clients(untrained.federation, np.array([0, 3]))
    assert fewer.names == tuple(name for k, name in enumerate(untrained.federation.names) if k not in (0, 3))
    assert set(fewer.train[0]) == set(untrained.federation.train[1])
    assert len(shadow_run(untrained, fewer, 7).training) == 6


def test_confidences_are_the_log_odds_of_the_models_probabilities(by_heart: Simulation) -> None:
    found = Candidates.draw(by_heart, 40, seed=1)
    values = confidences(by_heart, found)
    assert list(values) == ["personal"]
    for k in (0, 17, 60):
        model = next(m for m in by_heart.models_made_alone([int(found.who[k])], "personal") if m is not None)
        x, y = by_heart.federation.gather(torch.tensor([found.index[k]]))
        p = by_heart.task.to_module(model.vector)(x).softmax(-1)[0, y[0]]
        assert values["personal"][k] == pytest.approx(float(torch.log(p / (1 - p)).detach()), rel=1e-9)


def test_learning_by_heart_is_found(by_heart: Simulation) -> None:
    report = audit(by_heart, AuditSettings(("sample",), shadows=4, samples=88))
    loss, ratio = report.attacks
    assert [loss.name, ratio.name] == ["loss threshold", "likelihood ratio"]
    assert loss.scores.auc > 0.9
    assert ratio.scores.auc > 0.9
    assert loss.bound.epsilon > 0.5
    assert not loss.covered
    assert not report.contradictions


def test_where_nothing_was_learned_nothing_is_found(untrained: Simulation) -> None:
    steps: list[tuple[int, int]] = []
    settings = AuditSettings(("sample", "client"), shadows=4, samples=88)
    report = audit(untrained, settings, lambda done, total: steps.append((done, total)))
    assert steps == [(k, 8) for k in range(1, 9)]
    assert [(a.name, a.unit, a.target) for a in report.attacks] == [
        ("loss threshold", "sample", "global"),
        ("likelihood ratio", "sample", "global"),
        ("likelihood ratio", "client", "global"),
    ]
    for attack in report.attacks[1:]:
        assert attack.scores.auc == pytest.approx(0.5, abs=1e-6)
    assert all(attack.bound.epsilon == 0 for attack in report.attacks)


def test_the_guarantee_stands_beside_what_it_covers() -> None:
    privacy = UploadSettings(privacy=Privacy(clip=0.1, target_epsilon=2.0, where="central"))
    run = finished(Ditto, rounds=2, uploads=privacy)
    report = audit(run, AuditSettings(("sample", "canary"), shadows=0, samples=88, canaries=100))
    by_target = {(a.name, a.target): a for a in report.attacks}
    assert by_target["loss threshold", "personal"].accounted is None
    assert by_target["loss threshold", "global"].accounted == pytest.approx(2.0)
    canaries = by_target["canaries", "sum of uploads"]
    assert canaries.accounted == pytest.approx(2.0)
    assert canaries.least_epsilon <= 2.0


def test_what_cannot_be_attacked_is_said(by_heart: Simulation) -> None:
    report = audit(by_heart, AuditSettings(("client", "canary"), shadows=4))
    assert not report.attacks
    assert any("no global model" in note for note in report.notes)
    assert any("no section [privacy]" in note for note in report.notes)
    with pytest.raises(EquipoiseError, match="without malicious clients"):
        audit(finished(FedAvg, rounds=1, uploads=UploadSettings(attack=SignFlip(fraction=0.2))))
    with pytest.raises(EquipoiseError, match="even number"):
        AuditSettings(shadows=5)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished private run."""
    folder = tmp_path_factory.mktemp("audited")
    tables = small(data={"clients": 9, "samples": 60}, privacy={"clip": 0.5, "target_epsilon": 4.0})
    (folder / "small.toml").write_text(tomli_w.dumps(tables))
    assert equipoise_command("run", "small.toml", "--out", "run", "--quiet", cwd=folder).returncode == 0
    return folder


def test_the_command_writes_figures_and_a_picture(place: Path) -> None:
    done = equipoise_command("audit", "run", "--shadows", 4, "--canaries", 100, cwd=place)
    assert done.returncode == 0, done.stderr
    for word in ("AUC", "TPR", "accounted", "not covered", "canaries"):
        assert word in done.stdout
    found = json.loads((place / "run" / "audit.json").read_text())
    assert found["shadow_runs"] == 8
    assert found["privacy"]["epsilon_run"] == pytest.approx(4.0)
    assert {attack["unit"] for attack in found["attacks"]} == {"sample", "client"}
    assert (place / "run" / "audit.png").stat().st_size > 1000
    printed = equipoise_command("audit", "run", "--unit", "canary", "--canaries", 100, "--json", cwd=place)
    [canaries] = json.loads(printed.stdout)["attacks"]
    assert canaries == next(a for a in found["attacks"] if a["attack"] == "canaries")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            "run --unit sampel",
            "--unit sampel is not allowed; it must be sample, client or canary; did you mean 'sample'?",
        ),
        ("run --shadows 3", "--shadows 3 is not allowed; shadow runs come in pairs"),
        ("run --confidence 95", "--confidence 95 is not allowed; it must be from 0.5 to below 1"),
        ("run --out audit.txt", "the ending decides the format"),
        (".", "is not the folder of a run"),
    ],
)
def test_mistakes_get_a_sentence(words: str, answer: str, place: Path) -> None:
    one_sentence(equipoise_command("audit", *words.split(), cwd=place), 2, answer)


def test_a_contradiction_ends_with_exit_code_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.privacy.mechanisms import gaussian

    monkeypatch.setattr(gaussian, "__call__", lambda self, message, noise: message)
    done = equipoise_command("audit", "run", "--unit", "canary", "--canaries", 200, cwd=place)
    assert done.returncode == 1
    assert "canaries learned more than the guarantee allows" in done.stderr
