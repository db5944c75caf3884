"""Linear CKA: its definition, its invariances, and the command that measures it on a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.algorithms import Ditto, FedADMM, FedAvg, FedReCo, FedRep
from equipoise.equilibrium import layers as equilibria
from equipoise.evaluation.cka import heard_layers, layers, linear_cka, representations
from equipoise.executors.build import build_executor
from equipoise.models import MODELS
from equipoise.runs.similarity import measure, sides
from equipoise.runs.trained import SimulatedRun
from tests.support.commands import SMALL, equipoise_command
from tests.support.problems import simulation


def pair(n: int, p: int, q: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(n, p)) + 3), torch.from_numpy(rng.normal(size=(n, q)) - 1)


def by_definition(x: torch.Tensor, y: torch.Tensor) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), with the centring matrix."""
    n = len(x)
    centre = torch.eye(n).double() - 1 / n
    k, m = x @ x.mT, y @ y.mT

    def hsic(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.trace(a @ centre @ b @ centre)) / (n - 1) ** 2

    return hsic(k, m) / (hsic(k, k) * hsic(m, m)) ** 0.5


@given(st.integers(3, 30), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=80)
def test_it_is_what_its_definition_says_with_few_features_and_with_many(n: int, p: int, q: int, seed: int) -> None:
    x, y = pair(n, p, q, seed)
    found = linear_cka(x, y)
    assert found == pytest.approx(by_definition(x, y), rel=1e-9)
    assert found == pytest.approx(linear_cka(y, x), rel=1e-12)
    assert -1e-12 <= found <= 1 + 1e-12
    assert linear_cka(x, x) == pytest.approx(1)


@given(st.integers(4, 30), st.integers(2, 8), st.integers(0, 99), st.floats(0.01, 100))
@settings(max_examples=50)
def test_it_knows_neither_rotations_nor_scale_nor_shifts_but_other_maps(
    n: int, p: int, seed: int, scale: float
) -> None:
    x, y = pair(n, p, p + 1, seed)
    turn = torch.linalg.qr(torch.from_numpy(np.random.default_rng(seed + 1).normal(size=(p, p))))[0]
    assert linear_cka(scale * x @ turn + 5, y) == pytest.approx(linear_cka(x, y), rel=1e-9, abs=1e-12)
    stretched = x * torch.logspace(0, 3, p).double()
    assert linear_cka(stretched, x) < 1 - 1e-4


def test_a_constant_representation_is_like_nothing() -> None:
    assert np.isnan(linear_cka(torch.ones(5, 3), torch.randn(5, 2)))


def test_layers_are_those_with_weights_and_equilibria_are_one() -> None:
    assert layers(MODELS["lenet"]().build((1, 28, 28), 10)) == ["body.0", "body.3", "body.7", "body.9", "head"]
    assert len(layers(MODELS["resnet-18"](width=8).build((3, 32, 32), 10))) == 18 + 3  # 3 shortcuts change the width
    module = MODELS["deq-mlp"]().build((1, 8, 8), 10)
    (equilibrium, _), *_ = equilibria(module)
    names = layers(module)
    assert equilibrium in names
    assert not any(name.startswith(f"{equilibrium}.") for name in names)
    assert names[-1] == "head"


def test_layers_that_are_never_called_are_left_out_and_a_root_with_weights_is_one() -> None:
    attention = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    heard = heard_layers(attention, torch.randn(3, 5, 4))
    assert "linear1" in heard
    assert "self_attn.out_proj" not in heard
    root = torch.nn.Linear(3, 2)
    assert heard_layers(root, torch.randn(3, 3)) == [""]
    x = torch.randn(6, 3)
    torch.testing.assert_close(representations(root, x, [""])[0], root(x).detach())


def test_fedadmms_models_are_what_it_trained_and_not_what_it_sends() -> None:
    run = simulation(FedADMM(lr=0.1, rho=0.01), participation=1.0)
    run.run()
    (done, *_) = build_executor(run.engine, run.task, run.federation, run.algorithm, run.schedule).train(
        5, [run.job(3)], lambda: False
    )
    model = sides(run).local[3].vector
    assert torch.equal(model, done.client.theta)
    assert not torch.allclose(model, done.upload.message.u)


def test_what_is_compared_depends_on_what_there_is() -> None:
    found = {}
    for algorithm in (FedAvg(lr=0.1), Ditto(lr=0.1), FedReCo(lr=0.1), FedRep(lr=0.1)):
        run = simulation(algorithm, participation=1.0)
        run.run()
        found[type(algorithm).__name__] = measure(SimulatedRun(run), "x", 100, lambda done, total: None)
    assert found["FedAvg"].between == "models after local training and the global one"
    assert found["Ditto"].between == "personal models and the global one"
    assert found["FedReCo"].between == "personal models and consensus models"
    assert found["FedRep"].between == "personal models of two clients"
    assert len(found["FedRep"].pairs) == 15
    # FedRep's clients share all but their heads.
    assert found["FedRep"].values[0] == pytest.approx(np.ones(15))
    assert found["FedRep"].values[-1].max() < 1 - 1e-6
    for similarity in found.values():
        assert similarity.layers == ("body.encoder", "head")
        assert (similarity.values > 0).all()
        assert (similarity.values < 1 + 1e-9).all()


def test_models_that_are_the_same_are_alike() -> None:
    run = simulation(FedAvg(lr=1e-12), participation=1.0, rounds=1)
    run.run()
    assert measure(SimulatedRun(run), "x", 100, lambda done, total: None).values == pytest.approx(np.ones((2, 6)))


@pytest.mark.slow
def test_the_command_gives_a_table_a_picture_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(SMALL.format(rounds=2, name="fedavg"))
    equipoise_command("run", "a.toml", "--out", "r", cwd=tmp_path)
    done = equipoise_command("cka", "r", "--samples", "50", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "head" in done.stdout
    assert (tmp_path / "r" / "cka.png").stat().st_size > 5000
    table = json.loads((tmp_path / "r" / "cka.json").read_text())
    assert table["layers"] == ["head"]
    assert len(table["cka"][0]) == len(table["pairs"]) == 6
    (row,) = json.loads(equipoise_command("cka", "r", "--samples", "50", "--json", cwd=tmp_path).stdout)
    assert row["cka"][0]["mean"] == pytest.approx(np.mean(table["cka"][0]))
    assert equipoise_command("cka", "nowhere", cwd=tmp_path).returncode == 2
    wrong = equipoise_command("cka", "r", "--out", "a.jpg", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "FILE.png" in wrong.stderr
