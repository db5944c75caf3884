"""Results in memory and on disk: models, scores, predictions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.algorithms.base import Algorithm
from equipoise.config.experiment import Experiment
from equipoise.runs.launch import run as run_experiment
from tests.support.commands import small
from tests.support.odd_models import CLIENTS, batch_norm, images, module
from tests.support.problems import classification, small_mlp

X = CLIENTS[0][0]


def kinds(result: eq.Result) -> dict[str, list[str]]:
    """What each kind of model predicts, or why there is none."""
    x = np.random.default_rng(1).normal(size=(7, *result.federation.sample()[0].shape[1:]))
    found: dict[str, list[str]] = {}
    for client in [*result.clients[:4], None]:
        for kind in ("predict", "hybrid", "global_model"):
            try:
                if kind == "predict":
                    outputs = result.predict(client, x, batch=3)
                else:
                    model = getattr(result, kind)(client) if client else result.global_model()
                    outputs = model(torch.tensor(x, dtype=torch.float32)).detach().numpy()
                found.setdefault(kind, []).append(outputs.tobytes().hex())
            except eq.EquipoiseError as error:
                found.setdefault(kind, []).append(str(error))
    return found


def test_a_saved_and_loaded_result_predicts_the_same_numbers(algorithm: Algorithm, tmp_path: Path) -> None:
    federation = replace(classification(), unseen=frozenset(["client-3"]))
    result = eq.train(small_mlp(), federation, algorithm, rounds=2, mode="threads", workers=1, out=tmp_path / "run")
    loaded = eq.load_result(tmp_path / "run", small_mlp(seed=9), clients=federation)
    assert kinds(loaded) == kinds(result)
    assert loaded.clients == result.clients
    assert loaded.metrics == result.metrics
    assert loaded.summary["rounds"] == 2
    for kind, table in result.scores().items():
        np.testing.assert_array_equal(loaded.scores()[kind], table)
    assert loaded.scores().keys() == result.scores().keys()
    if not result.looks_up:  # without the data
        alone = eq.load_result(tmp_path / "run", small_mlp(seed=9))
        x = np.ones((2, 5), dtype="float32")
        np.testing.assert_array_equal(alone.predict(3, x), result.predict(3, x))


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_models_that_are_trained_when_asked_for_are_saved_as_they_are_given(mode: str, tmp_path: Path) -> None:
    """A stack rounds by its size, so what is saved must be made one client at a time, as it is when asked for."""
    tuned = eq.FedAvgFT(batch=4, lr=0.1)
    result = eq.train(small_mlp(), classification(), tuned, rounds=1, mode=mode)
    result.save(tmp_path / "saved")
    loaded = eq.load_result(tmp_path / "saved", small_mlp())
    for client in result.clients:
        assert torch.equal(loaded.personal_vector(client).vector, result.personal_vector(client).vector)


def test_buffers_frozen_weights_and_convolutions_come_back(tmp_path: Path) -> None:
    given = batch_norm()
    given.body[0].bias.requires_grad_(False)
    given.body[0].bias.data.fill_(0.3)
    result = eq.train(given, images(), eq.Ditto(batch=7, lr=0.1), rounds=2, out=tmp_path / "run")
    other = batch_norm()  # neither frozen nor with that bias
    loaded = eq.load_result(tmp_path / "run", other, clients=images())
    assert kinds(loaded) == kinds(result)
    for name, tensor in result.personal("b").state_dict().items():
        assert torch.equal(loaded.personal("b").state_dict()[name], tensor), name
    assert torch.equal(loaded.personal("b").body[0].bias, torch.full((3,), 0.3))
    assert other.body[0].bias.requires_grad  # what was given is left alone
    assert loaded.similarity().values == pytest.approx(result.similarity().values)


def test_a_saved_result_is_a_run_folder_that_can_be_copied(tmp_path: Path) -> None:
    result = eq.train(module(), CLIENTS, "ditto", head=None, rounds=2)
    result.save(tmp_path / "one")
    eq.load_result(tmp_path / "one", module()).save(tmp_path / "two")
    two = eq.load_result(tmp_path / "two", module())
    np.testing.assert_array_equal(two.predict(1, X), result.predict(1, X))
    assert two.metrics == result.metrics
    assert two.summary["algorithm"] == "Ditto"
    for target in ("one", "two"):
        with pytest.raises(eq.EquipoiseError, match="is not an empty folder; choose another"):
            result.save(tmp_path / target)
    with pytest.raises(eq.EquipoiseError, match="folder is of type NoneType"):
        result.save(None)  # type: ignore[arg-type]


def test_a_resumed_run_writes_the_models_of_its_last_round(tmp_path: Path) -> None:
    options = {"head": None, "out": tmp_path / "run"}
    eq.train(module(), CLIENTS, "fedavg", rounds=1, **options)
    longer = eq.train(module(), CLIENTS, "fedavg", rounds=3, resume=True, **options)
    loaded = eq.load_result(tmp_path / "run", module())
    assert loaded.summary["rounds"] == 3
    np.testing.assert_array_equal(loaded.predict(None, X), longer.predict(None, X))


def test_a_run_of_the_command_line_is_loaded_with_its_data_and_saved_without(tmp_path: Path) -> None:
    run_experiment(Experiment.parse(small()), tmp_path / "run")
    result = eq.load_result(tmp_path / "run")
    result.save(tmp_path / "saved")
    loaded = eq.load_result(tmp_path / "saved")  # a model of the library needs no module
    x = result.federation.x[:4]
    for client in result.clients:
        assert torch.equal(loaded.predict(client, x), result.predict(client, x))
    assert loaded.metrics == result.metrics


def test_predictions_are_those_of_the_personal_else_of_the_global_model() -> None:
    ditto = eq.train(module(), CLIENTS, "ditto", head=None, rounds=1)
    fedavg = eq.train(module(), CLIENTS, "fedavg", head=None, rounds=1)
    x = torch.tensor(X)
    with torch.no_grad():
        torch.testing.assert_close(ditto.predict(1, x, batch=3), ditto.personal(1)(x))
        torch.testing.assert_close(fedavg.predict(1, x), fedavg.global_model()(x))
        torch.testing.assert_close(ditto.predict(None, x), ditto.global_model()(x))
    assert isinstance(ditto.predict(1, x), torch.Tensor)
    for given in (X, X.tolist(), X.astype("float64")):
        found = ditto.predict("client-1", given)
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, ditto.predict(1, X))
    assert ditto.predict(1, X[:0]).shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (X[0], {}, r"there must be one row of shape \(4,\) per sample"),
        (X[:, :2], {}, r"does not take inputs of shape \(2,\)"),
        ("abc", {}, "the inputs are strings"),
        (X, {"batch": 0}, "batch = 0 is not allowed"),
        (X, {"client": 9}, "there is no client 9"),
        (X, {"client": 1.0}, r"there is no client 1\.0"),
        (X, {"client": True}, "there is no client True"),
    ],
)
def test_wrong_inputs_of_predict_are_said(x, options: dict, words: str) -> None:
    result = eq.train(module(), CLIENTS, "ditto", head=None, rounds=1)
    with pytest.raises(eq.EquipoiseError, match=words):
        result.predict(**{"client": 0, "x": x, **options})


def test_clients_are_found_by_any_integer() -> None:
    result = eq.train(module(), CLIENTS, "ditto", head=None, rounds=1)
    assert torch.equal(result.personal(np.int64(2))[0].weight, result.personal(2)[0].weight)


def test_what_is_missing_to_load_a_result_is_said(tmp_path: Path) -> None:
    class Mine(eq.FedAvg):
        """One's own."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none")

    run = tmp_path / "run"
    trained = eq.train(module(), CLIENTS, Mine(lr=0.2), head=None, loss=loss, rounds=1, out=run)

    def said(words: str, **options) -> None:
        with pytest.raises(eq.EquipoiseError, match=words):
            eq.load_result(**{"folder": run, "module": module(), **options})

    said("is not the folder of a run", folder=tmp_path)
    said("folder is of type int", folder=3)
    said("trained with a module of your own; give one like it: load_result", module=None)
    said("module is the class Linear; create a module of it", module=nn.Linear)
    said("module is of type int", module=3)
    said(r"its '0\.weight' has the shape \[6, 4\], and \[5, 4\] in the file", module=nn.Sequential(nn.Linear(4, 6)))
    said(r"it has '3\.weight' of shape \[3, 3\], which is not in the file", module=module().append(nn.Linear(3, 3)))
    said(r"the file has '2\.\w+' of shape .*, and the module has not", module=module()[:2])
    said("clients are not those of the run .* there are 3, and 4 in the saved run", clients=CLIENTS[:3])
    said("the split differs", clients=CLIENTS, split=(0.5, 0.2, 0.3))
    said("algorithm is of type int", algorithm=3)
    alone = eq.load_result(run, module())
    np.testing.assert_array_equal(alone.predict(0, X), trained.predict(0, X))
    new = {"new": CLIENTS[0]}
    for given, words in (
        ({}, "a loss of your own; give it to load_result as loss="),
        ({"loss": loss}, "Mine, an algorithm of your own; give it to load_result as algorithm=Mine"),
    ):
        with pytest.raises(eq.EquipoiseError, match=words):
            eq.load_result(run, module(), **given).adapt(new)
    whole = eq.load_result(run, module(), loss=loss, algorithm=Mine)
    np.testing.assert_array_equal(whole.adapt(new).scores()["personal"], trained.adapt(new).scores()["personal"])
    with pytest.raises(eq.EquipoiseError, match="loaded without the clients' data; give them to load_result"):
        alone.similarity()
    with pytest.raises(eq.EquipoiseError, match="the run itself is not in memory"):
        alone.simulation  # noqa: B018
    (run / "models.safetensors").write_bytes(b"nothing")
    said(r"models\.safetensors cannot be read")
    (run / "models.safetensors").unlink()
    said(r"has no models\.safetensors: the run is not finished")


def test_results_and_their_parts_say_in_a_line_what_they_are() -> None:
    result = eq.train(module(), CLIENTS, "ditto", head="2", rounds=1, unseen=0.25)
    run = result.simulation
    assert repr(result).startswith("Result(Ditto, 4 clients, 1 round: personal accuracy 0.")
    assert "unseen personal accuracy 0." in repr(result)
    assert "<td>personal</td><td>accuracy 0." in result._repr_html_()
    assert repr(run) == "Simulation(Ditto, 4 clients, 1 of 1 rounds)"
    assert repr(run.task) == "Task(Sequential, 43 parameters, accuracy, float32)"
    assert repr(run.task.space) == "ParameterSpace(4 parameters, 43 numbers: body 25, head 18)"
    assert repr(run.server) == "State(w: [43] float32)"
    assert repr(run.federation) == (
        "Federation(4 clients, 1 of them unseen; samples: 61 train, 8 validation, 17 test; x [4] float32, y [] int64)"
    )
    assert repr(result.similarity()).startswith("Similarity(Ditto, CKA of personal models and the global one: 0 ")
    assert repr(result.adapt({"new": CLIENTS[0]})).startswith("AdaptedClients(new: personal accuracy ")


def test_best_models_are_saved_and_loaded(tmp_path: Path) -> None:
    result = eq.train(module(), CLIENTS, "ditto", head=None, rounds=3, callbacks=[eq.BestModel()], out=tmp_path / "run")
    result.save(tmp_path / "copy")
    for folder in ("run", "copy"):
        loaded = eq.load_result(tmp_path / folder, module())
        for client in (None, 1):
            mine, theirs = (each.best(client).state_dict() for each in (result, loaded))
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    plain = eq.train(module(), CLIENTS, "ditto", head=None, rounds=1)
    with pytest.raises(eq.EquipoiseError, match="no best global model was kept"):
        plain.best()


def test_another_loss_metric_or_schedule_is_not_resumed(tmp_path: Path) -> None:
    def scaled(factor: float) -> Any:
        return lambda outputs, targets: factor * torch.nn.functional.cross_entropy(outputs, targets)

    options = {"head": None, "rounds": 1, "out": tmp_path / "run"}
    first = {"loss": scaled(1.0), "metric": "accuracy"}
    eq.train(module(), CLIENTS, eq.FedAvg(schedule=lambda k, n: 1 / k), **first, **options)
    for changed, sentence in (
        ({"loss": scaled(2.0)}, r"had task.loss = "),
        ({"metric": "macro-f1"}, r"had task.metrics = \['accuracy'\], not \['macro-f1'\]"),
    ):
        with pytest.raises(eq.EquipoiseError, match=sentence):
            eq.train(
                module(),
                CLIENTS,
                eq.FedAvg(schedule=lambda k, n: 1 / k),
                resume=True,
                **{**first, **changed, **options},
            )
    with pytest.raises(eq.EquipoiseError, match=r"had algorithm.schedule.function = "):
        eq.train(module(), CLIENTS, eq.FedAvg(schedule=lambda k, n: 2 / k), resume=True, **first, **options)
