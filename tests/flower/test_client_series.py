"""The time series of a client: what its windows are of, as it is written, read and made from a client's own file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import equipoise as eq
from equipoise.config.experiment import Experiment
from equipoise.data.federation import SPLITS, Federation, RaggedIndices
from equipoise.data.series_arrays import series_arrays
from equipoise.errors import EquipoiseError
from equipoise.flower import App, app_template
from equipoise.flower.client_data import client_data, write_client
from equipoise.flower.deployment_plan import DeploymentPlan
from tests.support import series
from tests.support.commands import is_one_sentence

LOADS = Path(__file__).parents[2] / "examples" / "loads"
WINDOWS = {"shape": [24], "outputs": 2, "targets": "numbers", "target_shape": [2], "horizon": 2, "unit": "kW"}


def make_plan(folder: Path, deploy: dict[str, Any], **tables: Any) -> DeploymentPlan:
    given = {"rounds": 1, "loss": "squared", "model": {"name": "linear"}, **tables, "deploy": deploy}
    (folder / "experiment.toml").write_text(tomli_w.dumps({**given, "algorithm": {"name": "fedavg"}}))
    return App(folder / "app.py").plan


def facts(federation: Federation, who: int) -> dict[str, list[Any]]:
    """What is known about a client's samples, in the order of its parts."""
    assert federation.series is not None
    own = np.concatenate([getattr(federation, split)[who] for split in SPLITS])
    return {name: array.tolist() for name, array in series_arrays(federation.series, own).items()}


def same(found: Federation, meant: Federation, who: int) -> None:
    """The client's federation is that of client `who` of all: samples, parts, series, scales."""
    for split in SPLITS:
        pairs = (each.gather(torch.from_numpy(getattr(each, split)[k])) for each, k in ((found, 0), (meant, who)))
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    ours, theirs = facts(found, 0), facts(meant, who)
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values)  # NaN where a value is missing


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    plan, federation = make_plan(tmp_path, WINDOWS), series.federation(2, hours=100)
    for who, name in enumerate(federation.names):
        write_client(tmp_path / "data.safetensors", federation, who)
        found = client_data(plan, name, {"data": str(tmp_path / "data.safetensors")})
        same(found, federation, who)
        assert found.series is not None
        assert (found.series.unit, found.series.step, found.series.horizon) == ("kW", 60, 2)


def test_a_client_may_have_samples_of_several_series(tmp_path: Path) -> None:
    """As with a partition that mixes owners; series of others are not written."""
    plan, every = make_plan(tmp_path, WINDOWS), series.federation(4, hours=100)
    kept = [RaggedIndices([np.concatenate([each[3], each[1]])]) for each in (every.train, every.validation, every.test)]
    mixed = replace(every, names=("both",), train=kept[0], validation=kept[1], test=kept[2])
    write_client(tmp_path / "data.safetensors", mixed, 0)
    found = client_data(plan, "both", {"data": str(tmp_path / "data.safetensors")})
    same(found, mixed, 0)
    assert found.series is not None
    assert every.series is not None
    assert len(found.series.values) == 200
    for kind in ("last", "daily", "weekly"):
        np.testing.assert_array_equal(found.series.naive(kind, found.test[0]), every.series.naive(kind, mixed.test[0]))


@pytest.mark.parametrize("unseen", [False, True])
def test_a_client_makes_its_windows_from_its_own_file_of_loads(unseen: bool, tmp_path: Path) -> None:
    """The same as the data set makes of the files of all, so that nobody has to bring windows."""
    given = {
        "name": "loads", "target": "load", "timezone": "Europe/Lisbon", "gaps": "interpolate", "horizon": 3,
        "lags": [168], "calendar": ["hour"], "cut": 0.75, "split": [0.8, 0.2, 0.0],
    }  # fmt: skip
    short = {"unseen": 0.3, "unseen_history": 400} if unseen else {}
    everybody = Experiment.parse(
        {"rounds": 1, "data": {**given, **short, "path": str(LOADS)}, "model": {"name": "linear"},
         "algorithm": {"name": "fedavg"}}
    )  # fmt: skip
    federation = everybody.federation(LOADS)
    deploy = app_template.describe(federation, everybody).table()
    assert (deploy["horizon"], deploy["step"], deploy["unit"]) == (3, 60, "kW")
    plan = make_plan(tmp_path, deploy, data={**given, **short})
    for who, name in enumerate(federation.names):
        settings = {"data": str(LOADS / f"{name}.csv"), "unseen": name in federation.unseen}
        same(client_data(plan, name, settings), federation, who)
    with pytest.raises(EquipoiseError) as caught:
        client_data(plan, "ward", {"data": str(tmp_path / "none.csv")})
    is_one_sentence(caught.value, "none.csv")


def test_the_users_function_may_return_a_federation_of_one(tmp_path: Path) -> None:
    plan, two = make_plan(tmp_path, WINDOWS), series.federation(2, hours=100)
    found = client_data(plan, "ward", {}, lambda settings: two.keeping(["c1"]))
    assert found.names == ("ward",)
    same(found, two, 1)
    with pytest.raises(EquipoiseError, match="a federation of 2 clients; it must have one client"):
        client_data(plan, "ward", {}, lambda settings: two)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"step": 30}, "the step of its time series is 60, but the experiment says deploy.step = 30"),
        ({"unit": "MW"}, "the unit of its time series is 'kW', but the experiment says deploy.unit = 'MW'"),
    ],
)
def test_all_clients_forecast_the_same(setting: dict[str, Any], words: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, {**WINDOWS, **setting})
    one = series.federation(1, hours=100)
    with pytest.raises(EquipoiseError) as caught:
        client_data(plan, "ward", {}, lambda settings: one)
    is_one_sentence(caught.value, words)


def test_a_horizon_that_is_not_the_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError) as caught:
        make_plan(tmp_path, {**WINDOWS, "horizon": 3})
    is_one_sentence(caught.value, "deploy.horizon = 3 does not agree with deploy.target_shape = [2]")


Arrays = dict[str, Tensor]


def _put(name: str, value: Any) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, f"series.{name}": value(arrays[f"series.{name}"].clone())}


BAD: dict[str, tuple[str, Callable[[Arrays], Arrays]]] = {
    "an array is missing": ("owner", lambda a: {k: v for k, v in a.items() if k != "series.owner"}),
    "an array too many": ("color", lambda a: {**a, "series.color": torch.zeros(1)}),
    "another kind of number": ("values", _put("values", Tensor.double)),
    "a matrix": ("values", _put("values", lambda t: t[None])),
    "no horizon": ("steps", _put("steps", lambda t: t * 0)),
    "begins beyond the end": ("begins", _put("begins", lambda t: t + 1)),
    "two scales": ("start", _put("shift", lambda t: t.repeat(2))),
    "an infinite shift": ("shift", _put("shift", lambda t: t / 0)),
    "a negative size": ("size", _put("size", lambda t: -t)),
    "a training part beyond the series": ("trained_until", _put("trained_until", lambda t: t + 10**6)),
    "an owner that does not exist": ("owner", _put("owner", lambda t: t + 1)),
    "fewer samples": ("owner", _put("owner", lambda t: t[1:])),
    "targets before the series": ("target", _put("target", lambda t: t - 10**6)),
    "targets after it": ("target", _put("target", lambda t: t + 2)),
}


@pytest.mark.parametrize("case", BAD)
def test_series_that_do_not_fit_are_an_error(case: str, tmp_path: Path) -> None:
    named, bend = BAD[case]
    plan, file = make_plan(tmp_path, WINDOWS), tmp_path / "data.safetensors"
    write_client(file, series.federation(1, hours=100), 0)
    save_file(bend(load_file(file)), file)
    with pytest.raises(EquipoiseError) as caught:
        client_data(plan, "ward", {"data": str(file)})
    is_one_sentence(caught.value, str(file), f"the array series.{named} is missing, of a wrong kind")


def test_a_simulation_takes_the_samples_of_such_a_file(tmp_path: Path) -> None:
    """Series are for deployments; the samples beside them are those of any folder."""
    write_client(tmp_path / "a.safetensors", series.federation(1, hours=100), 0)
    assert len(eq.load_data("folder", path=str(tmp_path)).train[0]) == len(series.federation(1, hours=100).train[0])
