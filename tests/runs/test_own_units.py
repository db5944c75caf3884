"""Scales travel with models: exported, saved and loaded, forecasts are in the data's own unit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import equipoise as eq
from equipoise.engine.model_files import write_tensors_of_model
from equipoise.runs.export import export_model
from tests.support import series
from tests.support.datafiles import electricity

TABLES: dict[str, Any] = {
    "rounds": 1,
    "data": {"name": "electricity", "window": 24, "horizon": 2},
    "model": {"name": "mlp"},
    "algorithm": {"name": "ditto", "lr": 0.1},
}


@pytest.fixture(scope="module", params=["squared", "pinball"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[eq.Result, Path]:
    """A run of a file, on loads of three clients."""
    from equipoise.config.experiment import Experiment
    from equipoise.runs.launch import run as launch

    folder = tmp_path_factory.mktemp("units")
    electricity(folder / "electricity.csv.gz", clients=3, hours=400)
    return launch(Experiment.parse({**TABLES, "loss": request.param}), folder / "run", folder), folder


def own(result: eq.Result, scaled: np.ndarray, who: int) -> np.ndarray:
    facts = result.federation.series
    assert facts is not None
    return scaled * facts.size[who] + facts.shift[who]


def test_an_exported_model_forecasts_in_the_unit_of_the_data(run: tuple[eq.Result, Path]) -> None:
    result, folder = run
    file = folder / "client.safetensors"
    export_model(folder / "run", "1", file)
    data = result.federation
    x = data.x[torch.from_numpy(data.test[1][:5])]
    model = eq.load_model(file, own_unit=True)
    assert isinstance(model, eq.Unscaled)
    expected = own(result, result.predict("1", x).numpy(), 1)
    assert np.allclose(model(x).detach().numpy().reshape(5, -1), expected, rtol=1e-5)
    assert np.allclose(result.unscaled("1")(x).detach().numpy().reshape(5, -1), expected, rtol=1e-5)
    loads = own(result, x.numpy(), 1)
    assert np.allclose(model.scaled(torch.from_numpy(loads)).numpy(), x.numpy(), atol=1e-6)
    assert not isinstance(eq.load_model(file), eq.Unscaled)
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["equipoise"])["series"]
    assert (facts["unit"], facts["window"], facts["horizon"], facts["step"]) == ("kW", 24, 2, 60)


def test_the_global_model_has_no_scale(run: tuple[eq.Result, Path]) -> None:
    _, folder = run
    file = folder / "global.safetensors"
    export_model(folder / "run", None, file)
    with pytest.raises(eq.EquipoiseError, match="only a client's own file of a model"):
        eq.load_model(file, own_unit=True)


@pytest.mark.parametrize("loss", ["squared", "pinball"])
def test_saved_results_know_scales(loss: str, tmp_path: Path) -> None:
    module = nn.Linear(24, 2 if loss == "squared" else 6)
    result = eq.train(module, series.federation(), "ditto", loss=loss, rounds=1)
    result.save(tmp_path / "saved")
    again = eq.load_result(tmp_path / "saved", module=module)
    x = result.federation.x[:4]
    assert torch.equal(again.predict(0, x), result.predict(0, x))
    assert torch.equal(again.unscaled("c1")(x), result.unscaled("c1")(x))
    export_model(tmp_path / "saved", "c1", tmp_path / "one.safetensors")
    loaded = eq.load_model(tmp_path / "one.safetensors", module, own_unit=True)
    assert torch.equal(loaded(x), result.unscaled("c1")(x))


def test_clients_of_other_data_have_no_unit() -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(30, 3)), rng.normal(size=(30, 1)))]
    result = eq.train(nn.Linear(3, 1), clients, "local", loss="squared", rounds=1)
    with pytest.raises(eq.EquipoiseError, match="not windows of one time series"):
        result.unscaled(0)


def test_quantiles_that_cross_are_sorted_when_a_result_predicts() -> None:
    result = eq.train(nn.Linear(24, 6), series.federation(), "local", loss="pinball", rounds=1)
    found = result.predict("c0", np.random.default_rng(0).normal(size=(50, 24)).astype("float32")).reshape(50, 2, 3)
    assert (np.diff(found, axis=-1) >= 0).all()


def test_a_scale_that_cannot_be_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(24, 2)
    series_facts = {"shift": 1.0, "size": 0.0, "horizon": 2}
    write_tensors_of_model(tmp_path / "m.safetensors", module.state_dict(), {"series": series_facts})
    with pytest.raises(eq.EquipoiseError, match=r"series\.size = 0\.0 is not allowed"):
        eq.load_model(tmp_path / "m.safetensors", module, own_unit=True)
