"""Callbacks on the server of a deployment: the same stop as in the simulator, and what only a deployment cannot do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from safetensors.torch import load_file

import equipoise as eq
from equipoise.callbacks.callback_list import CallbackList
from equipoise.flower import App
from tests.support.flower_memory import (
    SUPERLINK,
    Killed,
    MemoryGrid,
    clock_of_its_own,
    deployed,
    run,
    same,
    speaking_as,
    table,
)
from tests.support.problems import classification, simulation, small_mlp

ALGORITHM = eq.Ditto(lr=0.5, batch=4)
WATCH = {"name": "early-stopping", "model": "global", "patience": 2}
OPTIONS: dict[str, Any] = {"rounds": 12, "participation": 1.0}


def app(folder: Path, *callbacks: dict[str, Any], **more: Any) -> tuple[Any, MemoryGrid]:
    tables = {**OPTIONS, **more, "callbacks": list(callbacks)}
    return deployed(folder, classification(), small_mlp(), table(ALGORITHM), **tables)


def simulated(folder: Path, *callbacks: eq.Callback, **more: Any) -> Any:
    found = simulation(ALGORITHM, folder=folder, **{**OPTIONS, **more})
    found.callbacks = CallbackList(callbacks)
    found.run()
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_deployment_stops_at_the_same_round_with_the_same_models(tmp_path: Path) -> None:
    one = simulated(tmp_path / "simulated", eq.EarlyStopping(model="global", patience=2), eq.BestModel(model="global"))
    both, grid = app(tmp_path / "app", WATCH, {"name": "best-model", "model": "global"})
    other = run(both, grid, tmp_path / "run")
    assert one.done == other.done < 12
    same(lines(tmp_path / "run"), lines(tmp_path / "simulated"))
    torch.testing.assert_close(other.server.w, one.server.w, rtol=1e-9, atol=1e-12)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "simulated")]
    assert summaries[0]["stopped"] == summaries[1]["stopped"]
    same(summaries[0]["personal"], summaries[1]["personal"])
    # the updates of the next round had arrived and were dropped; they are counted, as they were sent
    assert summaries[0]["bytes_up"] * one.done == summaries[1]["bytes_up"] * (one.done + 1)
    assert summaries[0]["gradient_samples"] > summaries[1]["gradient_samples"]
    best = [load_file(tmp_path / name / "best" / "global.safetensors") for name in ("run", "simulated")]
    for key in best[1]:
        torch.testing.assert_close(best[0][key], best[1][key], rtol=1e-9, atol=1e-12)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events][-2:] == ["stopped", "finished"]
    assert f"the run stopped after round {one.done}: early stopping" in events[-2]["text"]
    # every client wrote the model that was scored last
    for who in range(6):
        assert list((tmp_path / "app" / f"state-{who}").rglob("personal.safetensors"))


def test_a_stop_in_a_round_that_is_not_scored_scores_it(tmp_path: Path) -> None:
    class Mine(eq.Callback):
        def on_round_end(self, line: dict[str, Any]) -> None:
            if line["round"] == 2:
                self.stop("enough")

    both, grid = app(tmp_path / "app", evaluate_every=5)
    both.callbacks = [Mine()]
    other = run(both, grid, tmp_path / "run")
    one = simulated(tmp_path / "simulated", rounds=2, evaluate_every=5)
    assert (other.done, other.stopped) == (2, "enough")
    same(lines(tmp_path / "run"), lines(tmp_path / "simulated"))
    torch.testing.assert_close(other.server.w, one.server.w, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_server_that_is_killed_at_any_order_stops_the_same(tmp_path: Path) -> None:
    """Early on; in the exchange whose updates are dropped; in the last one, which only scores."""
    callbacks = (WATCH, {"name": "best-model", "model": "global"})
    whole, grid = app(tmp_path / "app", *callbacks)
    expected = run(whole, grid, tmp_path / "whole")
    orders = sum(len(node.received) for node in grid.nodes.values())
    for number in (10, orders - 7, orders - 3):
        folder = tmp_path / str(number)
        killed, grid = app(folder / "app", *callbacks)
        count = 0

        def kill(message: Message, number: int = number) -> None:
            nonlocal count
            count += 1
            if count == number:
                raise Killed

        grid.on_push = kill
        with pytest.raises(Killed):
            run(killed, grid, folder / "run")
        again = run(killed, grid, folder / "run", resume=True)
        assert (again.done, again.stopped) == (expected.done, expected.stopped)
        assert (folder / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
        assert torch.equal(again.best.get(0).vector, expected.best.get(0).vector)
        # resumed again, even with more rounds, it asks nobody
        before = count
        (folder / "app" / "experiment.toml").write_text(
            (folder / "app" / "experiment.toml").read_text().replace("rounds = 12", "rounds = 40")
        )
        run(killed, grid, folder / "run", resume=True)
        assert count == before


@pytest.mark.parametrize(
    ("callback", "deploy", "message"),
    [
        ({"name": "best-model", "model": "personal"}, {}, "in a deployment, personal models stay with their clients"),
        ({"name": "early-stopping"}, {"evaluate": False}, "clients do not report any, as deploy.evaluate = false"),
    ],
)
def test_what_a_deployment_cannot_do_is_said(
    callback: dict[str, Any], deploy: dict[str, Any], message: str, tmp_path: Path
) -> None:
    both, grid = app(tmp_path / "app", callback, deploy=deploy)
    with pytest.raises(eq.EquipoiseError, match=message):
        run(both, grid, tmp_path / "run")
    assert not any(node.received for node in grid.nodes.values())


def test_a_callback_that_raises_is_noted_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    class Mine(eq.Callback):
        def on_round_end(self, line: dict[str, Any]) -> None:
            if line["round"] == 2 and not (tmp_path / "fixed").exists():
                raise ValueError("oh no")

    both, grid = app(tmp_path / "app", {"name": "best-model"}, rounds=4)
    both.callbacks = [Mine()]
    with pytest.raises(eq.RunFailed, match=r"the callback Mine failed in on_round_end: ValueError: oh no"):
        run(both, grid, tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "failed"
    assert any("best-model keeps the global model only" in event.get("text", "") for event in events)
    (tmp_path / "fixed").touch()
    other = run(both, grid, tmp_path / "run", resume=True)
    simulated(tmp_path / "simulated", rounds=4)
    assert other.done == 4
    same(lines(tmp_path / "run"), lines(tmp_path / "simulated"))


def test_callbacks_of_an_app_are_called_on_the_server(tmp_path: Path) -> None:
    class Mine(eq.Callback):
        def on_round_end(self, line: dict[str, Any]) -> None:
            if line["round"] == 2:
                self.stop("mine")

    both, grid = app(tmp_path / "app")
    given = App(tmp_path / "app" / "app.py", model=small_mlp, callbacks=[Mine()])
    context = Context(1, SUPERLINK, {}, RecordDict(), {"out": str(tmp_path / "run")})
    with speaking_as(SUPERLINK), clock_of_its_own():
        given._serve(grid, context)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == "mine"
    assert both.callbacks == ()


def test_clients_do_not_import_the_servers_callbacks(tmp_path: Path) -> None:
    both, _ = app(tmp_path / "app", {"name": "nowhere.py:Mine"})
    with pytest.raises(eq.EquipoiseError, match=r"a deployment imports no code by name; import it in app\.py"):
        _ = both.plan
    assert both.client_plan.experiment.callbacks == ()


def test_fewer_releases_than_planned_cost_less_privacy(tmp_path: Path) -> None:
    privacy = {"clip": 1.0, "sigma": 1.0}
    both, grid = app(tmp_path / "app", {**WATCH, "patience": 1}, privacy=privacy)
    other = run(both, grid, tmp_path / "run")
    guarantee = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    assert other.done < 12
    assert guarantee["releases"] == other.done + 1  # that of the round whose updates were dropped left the clients too
