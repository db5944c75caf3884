"""Commands on the folders of runs that were made from Python, and on newcomers."""

import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

import equipoise as eq
from tests.support.commands import equipoise_command, one_sentence, small
from tests.support.odd_models import CLIENTS, module

NET = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, the module of the run, and two new clients."""
    folder = tmp_path_factory.mktemp("python")
    eq.train(module(), CLIENTS, eq.Ditto(lr=0.1, batch=5), head=None, rounds=2, out=folder / "run")
    (folder / "net.py").write_text(NET)
    (folder / "new").mkdir()
    for name, (x, y) in zip(("anna", "ben"), CLIENTS, strict=False):
        np.savez(folder / "new" / f"{name}.npz", x=x, y=y)
    return folder


def test_compare_and_report_read_them(folder: Path) -> None:
    [row] = json.loads(equipoise_command("compare", "run", "--format", "json", cwd=folder).stdout)
    assert row["algorithm"] == "ditto"
    assert equipoise_command("report", "run", "--out", "report.html", cwd=folder).returncode == 0


def test_export_needs_no_module(folder: Path) -> None:
    result = eq.load_result(folder / "run", module())
    x = torch.tensor(CLIENTS[0][0])
    for options, model in ((("--client", "client-2"), result.personal(2)), (("--global",), result.global_model())):
        done = equipoise_command("export", "run", *options, "--out", "model.safetensors", cwd=folder)
        assert "load it with equipoise.load_model('model.safetensors', module=Net())" in done.stdout, done.stderr
        assert torch.equal(eq.load_model(folder / "model.safetensors", module())(x), model(x))
    said = equipoise_command("export", "run", "--client", "9", "--out", "model.safetensors", cwd=folder)
    one_sentence(said, 2, "there is no client 9; clients are 0 to 3")


@pytest.mark.parametrize(
    ("algorithm", "options", "words"),
    [
        ("fedavg", ("--client", "0"), "FedAvg has no personal models; export the global one with --global"),
        ("fedrep", ("--global",), "FedRep has no global model; export a client's personal model with --client"),
        ("knn-per", ("--client", "0"), "the global model together with the client's samples"),
    ],
)
def test_models_that_do_not_exist_are_not_exported(algorithm: str, options: tuple, words: str, tmp_path: Path) -> None:
    eq.train(module(), CLIENTS, algorithm, head="2", rounds=1).save(tmp_path / "run")
    one_sentence(equipoise_command("export", "run", *options, "--out", "m", cwd=tmp_path), 2, words)


def test_what_needs_module_or_data_says_how_to_give_them(folder: Path) -> None:
    one_sentence(equipoise_command("cka", "run", cwd=folder), 2, "made from Python", "load_result('run', module=")
    for words in (("run", "run"), ("run", "run/run.toml"), ("show", "run/run.toml"), ("sweep", "run/run.toml")):
        done = equipoise_command(*words, cwd=folder)
        one_sentence(done, 2, "made from Python with equipoise.train", "equipoise.load_result")
    said = equipoise_command("adapt", "run", "--data", "new", cwd=folder)
    one_sentence(said, 2, "trained with a module of your own; name it with --model FILE.py:NAME")


def test_the_folder_of_a_run_is_not_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(tomli_w.dumps(small()))
    assert equipoise_command("run", "small.toml", "--out", "run", "--quiet", cwd=tmp_path).returncode == 0
    said = equipoise_command("run", "run", cwd=tmp_path)
    one_sentence(said, 2, "run is the folder of a run; resume it with `equipoise run run/run.toml --out run --resume`")
    one_sentence(equipoise_command("run", ".", cwd=tmp_path), 2, ". is a folder; name a TOML file")


def test_newcomers_are_adapted_scored_and_written(folder: Path) -> None:
    options = ("adapt", "run", "--data", "new", "--model", "net.py:net")
    done = equipoise_command(*options, "--out", "models", cwd=folder)
    assert done.returncode == 0, done.stderr
    result = eq.load_result(folder / "run", module())
    adapted = result.adapt({"anna": CLIENTS[0], "ben": CLIENTS[1]})
    for name, scores in zip(adapted.clients, adapted.scores()["personal"], strict=True):
        assert f"{scores[3]:.4f}" in next(line for line in done.stdout.splitlines() if line.strip().startswith(name))
    assert "adapted" in done.stdout
    assert "global accuracy" in done.stdout
    x = torch.tensor(CLIENTS[3][0])
    loaded = eq.load_model(folder / "models" / "ben.safetensors", module())
    assert torch.equal(loaded(x), adapted.personal("ben")(x))
    rows = json.loads(equipoise_command(*options, "--json", cwd=folder).stdout)
    assert rows["metric"] == "accuracy"
    assert rows["clients"]["anna"]["adapted"]["test_metric"] == adapted.scores()["personal"][0, 3]
    one_sentence(equipoise_command(*options, "--out", "models", cwd=folder), 2, "models is not empty")
    one = equipoise_command("adapt", "run", "--data", "new/anna.npz", "--model", "net.py:net", cwd=folder)
    assert "ben" not in one.stdout
    assert one.returncode == 0


def test_newcomers_of_a_run_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(tomli_w.dumps(small()))
    assert equipoise_command("run", "small.toml", "--out", "run", "--quiet", cwd=tmp_path).returncode == 0
    result = eq.load_result(tmp_path / "run")
    x, y = result.federation.x.numpy(), result.federation.y.numpy()
    np.savez(tmp_path / "new.npz", **{"train.x": x[:9], "train.y": y[:9], "test.x": x[9:15], "test.y": y[9:15]})
    done = equipoise_command("adapt", "run", "--data", "new.npz", "--out", "models", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "adapted rmse" in done.stdout
    assert "module=" not in done.stdout
    loaded = eq.load_model(tmp_path / "models" / "new.safetensors")  # a model of the library needs no module
    expected = result.adapt({"new": {"train": (x[:9], y[:9]), "test": (x[9:15], y[9:15])}})
    assert torch.equal(loaded(result.federation.x[:3]), expected.personal("new")(result.federation.x[:3]))
