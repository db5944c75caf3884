"""Forecasts in a deployment: scored at home in the data's own unit, with the numbers of the simulator."""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn

import equipoise as eq
from equipoise.algorithms.base import Algorithm
from equipoise.data.federation import Federation
from equipoise.errors import EquipoiseError
from equipoise.evaluation.forecast_scores import NAIVE
from equipoise.flower import App
from equipoise.flower.client import Client
from equipoise.flower.client_data import write_client
from equipoise.flower.codec import RejectedMessage
from equipoise.flower.forecast_checks import check_forecasts
from equipoise.flower.protocol import FORECASTS, answer_shapes
from equipoise.flower.reported_forecasts import ReportedForecasts, reported
from equipoise.flower.server import Deployment
from equipoise.models.base import BodyAndHead
from equipoise.training.task import Task
from tests.support import series
from tests.support.flower_memory import MemoryGrid, deployed, in_both_engines, run, same, table
from tests.support.tampering import ORDERS, SHAPES, announced, changed

DEPLOY = {"shape": [24], "outputs": 2, "targets": "numbers", "target_shape": [2], "horizon": 2, "unit": "kW"}


def module() -> nn.Module:
    torch.manual_seed(0)
    return BodyAndHead(nn.Identity(), nn.Linear(24, 2))


def small(clients: int = 3, unseen: tuple[str, ...] = (), hours: int = 24 * 15) -> Federation:
    return series.federation(clients, hours=hours, unseen=unseen)


def app_of(folder: Path, federation: Federation, **tables: Any) -> tuple[App, MemoryGrid]:
    """An app that trains FedAvg on time series for a round."""
    deploy = {**DEPLOY, **tables.pop("deploy", {})}
    given = {"rounds": 1, "loss": "squared", "deploy": deploy, **tables}
    return deployed(folder, federation, module(), {"name": "fedavg", "batch": 40}, **given)


def rows(folder: Path) -> list[dict[str, Any]]:
    with (folder / "forecast.csv").open(newline="") as file:
        return [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def agree(over_flower: Deployment, folder: Path) -> dict[str, Any]:
    """Both engines have the same forecast part of summary.json and the same forecast.csv; return the former."""
    assert over_flower.transport.refused == {}
    ours, theirs = (
        json.loads((folder / name / "summary.json").read_text())["forecast"] for name in ("flower", "simulated")
    )
    same(ours, theirs)
    assert list(ours) == list(theirs)
    for mine, yours in zip(rows(folder / "flower"), rows(folder / "simulated"), strict=True):
        same(mine, yours)
    return ours


@pytest.mark.parametrize("algorithm", [eq.Ditto(lr=0.2, batch=20), eq.LeastSquares(ridge="validation")])
def test_engines_agree_on_forecasts(algorithm: Algorithm, tmp_path: Path) -> None:
    """With a client that does not train, and series that are long enough for a weekly forecast."""
    federation = small(4, unseen=("c3",), hours=24 * 20)
    over_flower, _ = in_both_engines(
        tmp_path,
        algorithm,
        federation,
        module(),
        tables={"deploy": DEPLOY},
        loss="squared",
        rounds=1,
        participation=1.0,
    )
    found = agree(over_flower, tmp_path)
    assert (found["unit"], found["step"], found["horizon"]) == ("kW", 60, 2)
    assert {"personal", "global", *NAIVE} <= found.keys()
    assert found["unseen"].keys() == {"personal", "global", *NAIVE}
    assert found["personal"]["skill"] is not None
    assert 0 < found["personal"]["coverage"] <= 1


def test_engines_agree_on_quantiles_and_on_what_is_not_defined(tmp_path: Path) -> None:
    """Ten days have no weekly forecast, and two validation samples no interval."""
    federation = small(2, hours=24 * 6)
    few = replace(
        federation, validation=type(federation.validation)([federation.validation[0][:2], federation.validation[1]])
    )
    model = BodyAndHead(nn.Identity(), nn.Linear(24, 6))
    over_flower, _ = in_both_engines(
        tmp_path,
        eq.FedAvg(lr=0.1, batch=20),
        few,
        model,
        tables={"deploy": {**DEPLOY, "outputs": 6}},
        loss="pinball",
        rounds=1,
        participation=1.0,
    )
    found = agree(over_flower, tmp_path)
    assert found["global"]["skill_clients"] == found["weekly"]["mae_clients"] == 0
    assert found["global"]["coverage_clients"] == 1
    [path] = (tmp_path / "app" / "state-0").glob("*/global.safetensors")
    assert eq.load_model(path, model, own_unit=True)(few.x[:5].double()).shape == (5, 2, 3)


def test_engines_agree_on_purged_folds(tmp_path: Path) -> None:
    """A client knows the hours of its windows, so that it purges the same ones as the simulator."""
    algorithm = eq.Learn2pFed(cells=2, outer="folds", folds=3, fold_order="blocks")
    over_flower, simulated = in_both_engines(
        tmp_path,
        algorithm,
        small(2, hours=150),
        module(),
        tables={"deploy": DEPLOY},
        loss="squared",
        rounds=1,
        participation=1.0,
    )
    torch.testing.assert_close(over_flower.server.w, simulated.server.w, rtol=1e-9, atol=1e-12)
    without = replace(small(2, hours=150), series=None)
    app, grid = deployed(
        tmp_path / "plain",
        without,
        module(),
        table(algorithm),
        rounds=1,
        participation=1.0,
        loss="squared",
        deploy={**DEPLOY, "horizon": 0},
    )
    assert not torch.equal(run(app, grid, tmp_path / "none").server.w, over_flower.server.w)


def test_the_models_that_a_client_keeps_answer_in_its_own_unit(tmp_path: Path) -> None:
    federation = small(2)
    app, grid = app_of(tmp_path / "app", federation)
    run(app, grid, tmp_path / "out")
    facts = federation.series
    assert facts is not None
    for who in range(2):
        [path] = (tmp_path / "app" / f"state-{who}").glob("*/global.safetensors")
        model, plain = eq.load_model(path, module(), own_unit=True), eq.load_model(path, module())
        assert isinstance(model, eq.Unscaled)
        assert (model.scale.unit, model.scale.step, model.scale.horizon) == ("kW", 60, 2)
        x = torch.full((1, 24), 0.5, dtype=torch.float64)
        torch.testing.assert_close(model(x), plain(x) * facts.size[who] + facts.shift[who])
        assert float(model.scaled(torch.tensor(facts.shift[who] + facts.size[who]))) == pytest.approx(1)
    with pytest.raises(EquipoiseError, match="has no scale of a time series"):
        eq.load_model(tmp_path / "out" / "global.safetensors", module(), own_unit=True)


def test_forecasts_are_switched_off_with_the_scores(tmp_path: Path) -> None:
    """By the experiment for all, by a client for itself; the models at home have their scale all the same."""
    app, grid = app_of(tmp_path / "app", small(3))
    grid.nodes[100].settings["evaluate"] = False
    grid.nodes[101].settings |= {"counts": True}
    deployment = run(app, grid, tmp_path / "out")
    assert sorted(deployment.scores.forecasts.numbers) == ["c1", "c2"]
    assert {row["client"] for row in rows(tmp_path / "out")} == {"c1", "c2"}
    [path] = (tmp_path / "app" / "state-0").glob("*/global.safetensors")
    assert isinstance(eq.load_model(path, module(), own_unit=True), eq.Unscaled)
    app, grid = app_of(tmp_path / "none", small(2), deploy={"evaluate": False})
    deployment = run(app, grid, tmp_path / "silent")
    assert "forecast" not in deployment.summary()
    assert not (tmp_path / "silent" / "forecast.csv").exists()


def test_a_client_without_series_has_scores_and_no_forecasts(tmp_path: Path) -> None:
    app, grid = app_of(tmp_path / "app", small(2))
    plain = replace(small(2), series=None)
    write_client(Path(grid.nodes[100].settings["data"]), plain, 0)
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {}
    assert sorted(deployment.scores.rows) == ["c0", "c1"]
    assert sorted(deployment.scores.forecasts.numbers) == ["c1"]


def test_they_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    app, grid = app_of(tmp_path / "app", small(2))
    deployment = run(app, grid, tmp_path / "out")
    (tmp_path / "out" / "forecast.csv").rename(tmp_path / "before.csv")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["forecast"]
    (tmp_path / "out" / "summary.json").unlink()
    asked = len(grid.nodes[100].received)
    again = run(app, grid, tmp_path / "out", resume=True)
    assert len(grid.nodes[100].received) == asked
    assert again.summary()["forecast"] == deployment.summary()["forecast"] == summary
    assert (tmp_path / "out" / "forecast.csv").read_text() == (tmp_path / "before.csv").read_text()


# What leaves a client


PRIVACY = {"clip": 1.0, "sigma": 2.0, "delta": 1e-5}


def _client(folder: Path, **options: Any) -> Client:
    tables = {key: options.pop(key) for key in ("privacy", "deploy") if key in options}
    app, grid = app_of(folder, small(2, hours=100), **tables)
    return Client(app.plan, {**grid.nodes[100].settings, **options})


def test_what_is_sent_is_listed(tmp_path: Path) -> None:
    def line(**options: Any) -> list[str]:
        lines = _client(tmp_path / str(len(list(tmp_path.iterdir()))), **options).disclosures()
        return [line for line in lines if "forecast" in line]

    [told] = line()
    assert told.startswith("- errors of forecasts in kW: 13 numbers per model and per naive forecast")
    assert "privacy" not in told
    [told] = line(privacy=PRIVACY)
    assert told.endswith("(not covered by privacy)")
    off = "- no scores, no sizes of splits, no confusion matrices, no forecasts"
    assert line(evaluate=False) == line(deploy={"evaluate": False}) == line(privacy=PRIVACY, counts=False) == [off]
    assert line(deploy={"horizon": 0}) == []


def test_under_privacy_they_are_sent_or_kept_with_the_scores(tmp_path: Path) -> None:
    app, grid = app_of(tmp_path / "app", small(3, hours=100), privacy=PRIVACY)
    grid.nodes[101].settings["counts"] = False
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {}
    assert set(deployment.scores.forecasts.numbers) == set(deployment.scores.rows) == {"c0", "c2"}
    events = (tmp_path / "out" / "events.jsonl").read_text()
    assert "errors of forecasts" in events  # among what privacy does not cover


def test_only_what_is_announced_may_be_sent(tmp_path: Path) -> None:
    app, _ = app_of(tmp_path, small(2, hours=100))
    metrics = app.plan.task().metrics
    shapes = answer_shapes(announced(app), metrics, ["personal", "global"], horizon=2)
    assert {k: v for k, v in shapes.items() if k.startswith(FORECASTS)} == {
        f"{FORECASTS}.{kind}": ((13,), torch.float64) for kind in ("personal", "global", *NAIVE)
    }
    assert not any(name.startswith(FORECASTS) for name in answer_shapes(announced(app), metrics))


def test_forecasts_before_the_end_are_refused(tmp_path: Path) -> None:
    app, grid = app_of(tmp_path / "app", small(2, hours=100), rounds=2)
    SHAPES["now"] = answer_shapes(announced(app), app.plan.task().metrics, ["personal", "global"], horizon=2)

    def tamper(order: Message, reply: Message) -> list[Message]:
        ORDERS[id(reply)] = order
        early = order.metadata.group_id == "2" and order.metadata.message_type != "evaluate"
        more = {f"{FORECASTS}.last": torch.zeros(13, dtype=torch.float64)}
        return [changed(reply, tensors=lambda found: {**found, **more})] if early else [reply]

    grid.nodes[101].tamper = tamper
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"scores": 1}
    assert "before training was over" in (tmp_path / "out" / "events.jsonl").read_text()


# What no honest client can send


@pytest.fixture(scope="module")
def honest() -> dict[str, Tensor]:
    """What a client reports, whose series is long enough for weekly forecasts."""
    federation = small(1, hours=24 * 20).prepared(torch.float64, False)
    task = Task(module(), federation.sample(), loss="squared", dtype=torch.float64)
    return reported(task, federation, {"personal": module().double(), "global": module().double()})


TEST = 91
"""Test samples of that client."""


def test_an_honest_client_is_believed(honest: dict[str, Tensor]) -> None:
    table = ReportedForecasts("kW", 60, 2)
    table.add("a", honest, {"personal", "global"}, TEST)
    table.add("b", {}, {"personal", "global"}, TEST)
    scores = table.scores((), ())
    assert scores is not None
    assert [row.client for row in scores.rows] == ["a"] * 5
    again = ReportedForecasts("kW", 60, 2)
    again.restore(table.tensors())
    for kind, numbers in honest.items():
        torch.testing.assert_close(torch.from_numpy(again.numbers["a"][kind]), numbers, rtol=0, atol=0, equal_nan=True)


def _set(kind: str, place: int, value: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(found: dict[str, Tensor]) -> dict[str, Tensor]:
        numbers = found[kind].clone()
        numbers[place] = value(float(numbers[place])) if callable(value) else value
        return {**found, kind: numbers}

    return change


LIES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "a model is missing": lambda t: {k: v for k, v in t.items() if k != "global"},
    "a naive forecast is missing": lambda t: {k: v for k, v in t.items() if k != "daily"},
    "one too many": lambda t: {**t, "consensus": t["personal"]},
    "NaN": _set("personal", 2, math.nan),
    "infinite": _set("personal", 3, math.inf),
    "negative": _set("global", 4, -1.0),
    "half a value": _set("last", 0, 0.5),
    "fewer values than samples": _set("personal", 1, lambda n: n - 1),
    "more values than samples": _set("daily", 0, TEST + 1.0),
    "huge": _set("global", 2, 1e20),
    "error without values": lambda t: _set("weekly", 2, 1.0)(_set("weekly", 0, 0.0)(t)),
    "squares too small": _set("personal", 4, lambda s: s / 1e6),
    "squares too large": _set("personal", 4, lambda s: s * 1e6),
    "relative errors of no value": _set("personal", 7, 0.0),
    "more relative values than values": _set("personal", 7, 2 * TEST + 1.0),
    "compared values": _set("last", 10, 2 * TEST + 1.0),
    "compared errors above all errors": _set("personal", 8, lambda s: 1000 * s + 1000),
    "other values for one model": _set("global", 5, lambda s: s * 1.01),
    "another naive error for one model": _set("global", 9, lambda s: s * 1.01),
    "a weekly forecast better than itself": _set("weekly", 9, lambda s: s * 1.01),
    "coverage above one": _set("personal", 11, 1.1),
    "width below zero": _set("personal", 12, -0.1),
    "coverage without width": _set("personal", 12, math.nan),
    "infinite width": _set("personal", 12, math.inf),
    "an interval of a naive forecast": lambda t: _set("last", 11, 0.5)(_set("last", 12, 0.5)(t)),
}


@pytest.mark.parametrize("lie", LIES)
def test_impossible_errors_are_rejected(lie: str, honest: dict[str, Tensor]) -> None:
    check_forecasts(honest, ["personal", "global"], 2, TEST)
    with pytest.raises(RejectedMessage) as caught:
        check_forecasts(LIES[lie](honest), ["personal", "global"], 2, TEST)
    assert caught.value.reason == "scores"


def test_a_client_without_test_samples_has_no_forecasts(honest: dict[str, Tensor]) -> None:
    with pytest.raises(RejectedMessage):
        check_forecasts(honest, ["personal", "global"], 2, 0)


def test_a_lie_costs_the_client_all_its_scores(tmp_path: Path) -> None:
    app, grid = app_of(tmp_path / "app", small(2, hours=100))
    SHAPES["now"] = answer_shapes(announced(app), app.plan.task().metrics, ["personal", "global"], horizon=2)
    lie = LIES["negative"]

    def bent(found: Any) -> dict[str, Tensor]:
        own = {k.removeprefix(f"{FORECASTS}."): t for k, t in found.items() if k.startswith(FORECASTS)}
        return {**found, **{f"{FORECASTS}.{k}": t for k, t in lie(own).items()}}

    def tamper(order: Message, reply: Message) -> list[Message]:
        ORDERS[id(reply)] = order
        last = order.metadata.message_type == "evaluate"
        return [changed(reply, tensors=bent)] if last else [reply]

    grid.nodes[101].tamper = tamper
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"scores": 1}
    assert sorted(deployment.scores.rows) == sorted(deployment.scores.forecasts.numbers) == ["c0"]
