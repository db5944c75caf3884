"""The Python interface."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import equipoise as eq
from equipoise.config.experiment import Experiment
from equipoise.engine.assembly import experiment_module
from equipoise.runs import launch
from tests.support.waiting import LIMIT

RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(20, 4)).astype("float32"), RNG.integers(0, 3, 20)) for _ in range(4)]


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.slow
def test_the_example_runs(capsys: pytest.CaptureFixture) -> None:
    runpy.run_path(str(Path(__file__).parent.parent / "examples" / "own_model.py"))
    printed = capsys.readouterr().out
    assert "personal" in printed
    assert "Linear(in_features=20, out_features=32" in printed


def test_arrays_datasets_and_tensors_are_the_same_clients() -> None:
    tensors = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in CLIENTS]
    datasets = [TensorDataset(x, y) for x, y in tensors]
    runs = [eq.train(module(), c, eq.FedAvg(batch=5), head=None, rounds=2) for c in (CLIENTS, tensors, datasets)]
    assert runs[0].metrics == runs[1].metrics == runs[2].metrics


def test_models_come_back_as_ordinary_modules_of_their_own() -> None:
    given = module()
    result = eq.train(given, CLIENTS, eq.FedRep(batch=5, lr=0.1), head="2", rounds=3, names=["a", "b", "c", "d"])
    one, two = result.personal("a"), result.personal(1)
    assert isinstance(one, nn.Sequential)
    assert torch.equal(one[0].weight, two[0].weight)  # the common body
    assert not torch.equal(one[2].weight, two[2].weight)  # heads of their own
    with torch.no_grad():
        one[0].weight.zero_()
    assert result.personal("a")[0].weight.abs().sum() > 0
    assert torch.equal(given[0].weight, module()[0].weight)  # the module that was given is left alone
    with pytest.raises(eq.EquipoiseError, match="no global model"):
        result.global_model()
    with pytest.raises(eq.EquipoiseError, match="no client 'e'; clients are 0 to 3, or by name, such as 'a'"):
        result.personal("e")


def test_the_personal_model_is_not_the_global_one() -> None:
    result = eq.train(module(), CLIENTS, eq.Ditto(batch=5, lr=0.1, lam=0.1), head=None, rounds=3)
    assert not torch.equal(result.personal(0)[0].weight, result.global_model()[0].weight)
    assert isinstance(result.hybrid(0), nn.Sequential)


@pytest.mark.slow
def test_fine_tuned_models_are_those_that_were_scored() -> None:
    result = eq.train(module(), CLIENTS, eq.FedAvgFT(batch=5, lr=0.1), head=None, rounds=2)
    federation = result.federation
    x, y = federation.gather(torch.from_numpy(federation.test[2]))
    with torch.no_grad():
        found = (result.personal(2)(x).argmax(1) == y).float().mean().item()
    assert result.scores()["personal"][2, 3] == pytest.approx(found)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_of_ones_own(reduction: str) -> None:
    own = nn.CrossEntropyLoss(label_smoothing=0.0, reduction=reduction)
    result = eq.train(module(), CLIENTS, eq.Ditto(batch=5), head=None, loss=own, rounds=2)
    usual = eq.train(module(), CLIENTS, eq.Ditto(batch=5), head=None, rounds=2)
    # a loss that gives only means cannot be stacked, so it runs in threads
    assert result.summary["mode"] == ("threads" if reduction == "mean" else "stacked")
    for kind in ("personal", "global"):
        assert result.summary[kind]["loss"] == pytest.approx(usual.summary[kind]["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge"}, "unknown loss 'hinge'; available: cross-entropy, squared"),
        ({"metric": "f1"}, "unknown metric 'f1'"),
        ({"head": "fc"}, "head='fc' matches no parameter of the model"),
        ({"participation": 9}, "participation = 9 is more than the 4 clients"),
        ({"loss": lambda o, t: o}, "the loss returns shape"),
    ],
)
def test_wrong_arguments_are_said(options: dict, message: str) -> None:
    with pytest.raises(eq.EquipoiseError, match=message):
        eq.train(module(), CLIENTS, eq.FedAvg(), **{"rounds": 1, "head": None, **options})


def test_a_module_that_does_not_fit_the_data_is_said() -> None:
    with pytest.raises(eq.EquipoiseError, match=r"does not take inputs of shape \(4,\)"):
        eq.train(nn.Linear(7, 3), CLIENTS, eq.FedAvg(), rounds=1)


@pytest.mark.slow
def test_gradient_samples_count_what_went_through_a_backward_pass() -> None:
    train = 4 * 14  # four clients, 70% of 20 samples
    fedavg = eq.train(module(), CLIENTS, eq.FedAvg(batch=5, epochs=2), head=None, rounds=3)
    ditto = eq.train(module(), CLIENTS, eq.Ditto(batch=5, epochs=2), head=None, rounds=3)
    tuned = eq.train(module(), CLIENTS, eq.FedAvgFT(batch=5, epochs=2, finetune_epochs=3), head=None, rounds=3)
    assert fedavg.summary["gradient_samples"] == 3 * 2 * train
    assert ditto.summary["gradient_samples"] == 2 * 3 * 2 * train
    assert tuned.summary["gradient_samples"] == 3 * 2 * train + 3 * train  # and the fine-tuning, once


def test_when_every_update_is_bad_the_run_stops_and_says_so() -> None:
    with pytest.raises(eq.RunFailed, match="every client's update has NaN or infinite numbers"):
        eq.train(module(), CLIENTS, eq.FedAvg(lr=1e30, batch=5, epochs=3), head=None, rounds=3)


def test_a_run_leaves_the_callers_random_numbers_and_threads_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    threads = torch.get_num_threads()
    given = module()
    for mode in ("threads", "stacked"):
        torch.manual_seed(5)
        eq.train(given, CLIENTS, eq.FedAvg(), head=None, rounds=1, mode=mode)
        assert torch.equal(torch.rand(3), expected)
        assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_a_run_in_a_folder_can_be_resumed_and_lengthened(tmp_path: Path) -> None:
    options = {"head": None, "out": tmp_path / "run", "checkpoint_every": 2}
    whole = eq.train(module(), CLIENTS, eq.Ditto(batch=5), head=None, rounds=5)
    eq.train(module(), CLIENTS, eq.Ditto(batch=5), rounds=3, **options)
    with pytest.raises(eq.EquipoiseError, match="already holds a run"):
        eq.train(module(), CLIENTS, eq.Ditto(batch=5), rounds=3, **options)
    with pytest.raises(eq.EquipoiseError, match=r"had algorithm.batch = 5, not 6"):
        eq.train(module(), CLIENTS, eq.Ditto(batch=6), rounds=5, resume=True, **options)
    longer = eq.train(module(), CLIENTS, eq.Ditto(batch=5), rounds=5, resume=True, **options)
    assert longer.metrics == whole.metrics


@pytest.mark.slow
def test_data_sets_by_name_serve_train_as_they_serve_a_run(tmp_path: Path) -> None:
    settings = {"name": "digits-by-writer", "extent": "excerpt", "clients": 6, "unseen": 0.2}
    federation = eq.load_data(**settings, seed=3)
    experiment = Experiment.parse(
        {"seed": 3, "rounds": 2, "data": settings, "model": {"name": "softmax"}, "algorithm": {"name": "fedavg"}}
    )
    assert federation.fingerprint(splits=True) == experiment.federation(tmp_path).fingerprint(splits=True)
    run = launch.run(experiment, tmp_path / "run")
    result = eq.train(
        experiment_module(experiment, federation.sample()[0].shape[1:], federation.outputs),
        federation,
        eq.FedAvg(),
        rounds=2,
        seed=3,
    )
    assert result.metrics == run.metrics
    assert result.summary["dataset"] == "digits-by-writer (excerpt of 80 writers)"
    assert result.summary["unseen"] == run.summary["unseen"]
    with pytest.raises(eq.EquipoiseError, match=r"unknown setting data\.client; did you mean 'clients'"):
        eq.load_data("mnist", client=3)


@pytest.mark.slow
def test_names_come_when_they_are_asked_for_and_torchmetrics_with_metrics_that_need_it() -> None:
    """Without PyTorch, which takes seconds to load; so Ctrl-C at the start of a command finds somebody who listens."""
    code = """
import sys
import equipoise.cli.app
assert "torch" not in sys.modules
import equipoise
assert "train" in dir(equipoise)
from equipoise import *
assert Ditto is equipoise.Ditto is equipoise.ALGORITHMS["ditto"]
assert not hasattr(equipoise, "nothing")
import numpy, torch
clients = [(numpy.random.rand(9, 2).astype("float32"), numpy.arange(9) % 2) for _ in range(2)]
equipoise.train(torch.nn.Linear(2, 2), clients, equipoise.FedAvg(), head=None, rounds=1)
assert "torchmetrics" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
