"""Modules of an algorithm's own: they are part of the model everywhere, and of its files."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.algorithms import GPFL, FedAvg, FedDBE
from equipoise.algorithms.fedcp import Context, GlobalHead, PersonalHead, Policy
from equipoise.algorithms.own_modules import OwnHead, with_own_modules
from equipoise.api import Result
from equipoise.config.uploads import UploadSettings
from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead
from equipoise.parameter_space import ParameterSpace
from equipoise.privacy.mechanisms import Privacy
from tests.support.flower_memory import deployed, run, table
from tests.support.problems import classification, metrics, registered, simulation, small_mlp

OWN = ["feddbe", "gpfl", "fedcp"]


def drawn(seed: int) -> Tensor:
    module = with_own_modules(small_mlp(), "head", GPFL(), seed)
    return ParameterSpace(module, "head").vector(module)


def test_what_they_draw_depends_on_the_seed_of_the_run_alone() -> None:
    torch.rand(3)
    one = drawn(0)
    torch.rand(5)
    assert torch.equal(one, drawn(0))
    assert not torch.equal(one, drawn(1))


def test_the_model_itself_is_left_as_it_is_and_nothing_is_added_twice() -> None:
    module = small_mlp()
    before = dict(module.state_dict())
    once = with_own_modules(module, "head", FedDBE())
    assert with_own_modules(once, "head", FedDBE()) is once
    assert with_own_modules(module, "head", FedAvg()) is module
    assert module.state_dict().keys() == before.keys()
    x = torch.randn(4, 5)
    torch.testing.assert_close(once(x), module(x))  # the shift is zero


def test_their_parameters_are_found_by_their_classes_after_those_of_the_model() -> None:
    run = simulation(registered("fedcp"))
    run.close()
    space, d, head = run.task.space, 8, 27
    spans = [space.span(part) for part in (PersonalHead, GlobalHead, Policy, Context)]
    assert [span.stop - span.start for span in spans] == [head, head, 2 * d**2 + 6 * d, d]
    assert [span.start for span in spans] == [space.body_size, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == space.size
    with pytest.raises(EquipoiseError, match="not next to each other"):
        space.span([PersonalHead, Policy])


@pytest.mark.parametrize(
    "head", [nn.Sequential(nn.Linear(8, 3), nn.Tanh()), nn.Linear(8, 3).requires_grad_(False), nn.Bilinear(8, 8, 3)]
)
def test_heads_that_are_not_one_trained_linear_layer_are_refused(head: nn.Module) -> None:
    with pytest.raises(EquipoiseError, match="FedDBE puts modules of its own around the model's head"):
        with_own_modules(BodyAndHead(nn.Identity(), head), "head", FedDBE())
    with pytest.raises(EquipoiseError, match="here it is nothing"):
        with_own_modules(small_mlp(), None, FedDBE())


@pytest.mark.parametrize("name", OWN)
def test_models_come_back_from_a_run_folder_and_from_a_file(name: str, tmp_path: Path) -> None:
    clients = [(torch.randn(20, 5).numpy(), torch.arange(20).numpy() % 3) for _ in range(3)]
    result = eq.train(small_mlp(), clients, registered(name), rounds=2, out=tmp_path / "run")
    x = torch.randn(7, 5)
    wanted = result.personal(1)(x)
    loaded = eq.load_result(tmp_path / "run", module=small_mlp(1))
    torch.testing.assert_close(loaded.personal(1)(x), wanted, rtol=0, atol=0)
    assert isinstance(loaded.personal(1).head, nn.Module)
    adapted = loaded.adapt(clients[:1])
    adapted.save(tmp_path / "adapted")
    (file,) = (tmp_path / "adapted").glob("*.safetensors")
    torch.testing.assert_close(eq.load_model(file, module=small_mlp(2))(x), adapted.personal(0)(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", OWN)
def test_an_exported_model_of_the_library_is_loaded_from_the_file_alone(name: str, tmp_path: Path) -> None:
    from equipoise.config.experiment import Experiment
    from equipoise.engine.model_files import write_model

    tables = {"data": {"name": "digits-by-writer"}, "model": {"name": "mlp"}, "algorithm": {"name": name}}
    experiment = Experiment.parse(tables)
    assert experiment.model is not None
    module = with_own_modules(experiment.model.build((5,), 3), "head", experiment.algorithm, seed=4).eval()
    write_model(tmp_path / "model.safetensors", module, experiment, (5,), 3, "digits", "client")
    loaded = eq.load_model(tmp_path / "model.safetensors")
    x = torch.randn(6, 5)
    assert any(isinstance(layer, OwnHead) for layer in loaded.modules())
    torch.testing.assert_close(loaded(x), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", [*OWN, "pfedfda"])
def test_a_resumed_run_has_the_same_bytes_and_a_deployment_the_same_numbers(name: str, tmp_path: Path) -> None:
    algorithm, kinds = registered(name), {"rounds": 4, "participation": 0.5, "checkpoint_every": 1}
    whole = simulation(algorithm, folder=tmp_path / "whole", **kinds)
    whole.run()
    first = simulation(algorithm, folder=tmp_path / "cut", **kinds)
    for _ in range(2):
        first.advance()
    first.close()
    rest = simulation(algorithm, folder=tmp_path / "cut", new=False, **kinds)
    rest.resume()
    rest.run()
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    app, grid = deployed(tmp_path / "app", classification(), small_mlp(), table(algorithm), **kinds)
    over_flower = run(app, grid, tmp_path / "flower")
    for field, t in whole.server.items():
        torch.testing.assert_close(over_flower.server[field], t, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("where", ["local", "central"])
@pytest.mark.parametrize("name", [*OWN, "pfedfda"])
def test_privacy_of_clients_and_a_server_optimizer_leave_models_finite(name: str, where: str) -> None:
    uploads = UploadSettings(privacy=Privacy(clip=0.5, sigma=0.1, where=where))
    algorithm = type(registered(name))(**{**dict(registered(name)), "server_optimizer": "adam"})
    made = simulation(algorithm, uploads=uploads, rounds=3)
    made.run()
    assert made.counters.left_out == 0
    assert made.server.finite()
    for who in range(6):
        vector = Result(made).personal_vector(who).vector
        assert bool(vector.isfinite().all())
