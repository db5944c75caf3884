"""A server that is killed goes on from its last checkpoint, as if nothing had happened."""

import json
import os
import signal
from pathlib import Path

import pytest
from flwr.app import Message
from torch import nn

from equipoise import load_model
from equipoise.errors import EquipoiseError
from equipoise.flower.server import Deployment
from tests.support.flower_memory import deployed, run
from tests.support.flower_problem import OPTIONS, PROBLEM
from tests.support.forked import Forked
from tests.support.problems import classification, small_mlp


def serve_until_killed(folder: Path, at: int) -> None:
    """Serve, and die with the message of this number."""
    app, grid = deployed(folder / "app", *PROBLEM, **OPTIONS)
    pushes = 0

    def on_push(message: Message) -> None:
        nonlocal pushes
        pushes += 1
        if pushes == at:
            os.kill(os.getpid(), signal.SIGKILL)

    grid.on_push = on_push
    run(app, grid, folder / "out")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Deployment, Path]:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    app, grid = deployed(folder / "app", *PROBLEM, **OPTIONS)
    return run(app, grid, folder / "out"), folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 11, 14, 22])
def test_killed_and_resumed(at: int, whole: tuple[Deployment, Path], tmp_path: Path) -> None:
    """4 greetings, then 4 orders an exchange: killed before, in the first, in the middle and in the last one."""
    expected, there = whole
    with Forked(tmp_path / "log", serve_until_killed, tmp_path, at) as killed:
        assert killed.wait() == -signal.SIGKILL, killed.said()
    app, grid = deployed(tmp_path / "app", *PROBLEM, **OPTIONS)
    resumed = run(app, grid, tmp_path / "out", resume=True)
    assert len(expected.pipeline.malicious) == 1
    for name in ("metrics.jsonl", "clients.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (there / name).read_bytes()
    assert resumed.transport.refused == {}
    assert expected.server.keys() == resumed.server.keys()
    assert all(expected.server[k].equal(resumed.server[k]) for k in expected.server)


def test_a_finished_run_is_finished(tmp_path: Path) -> None:
    app, grid = deployed(tmp_path / "app", classification(3), small_mlp(), {"name": "ditto"})
    first = run(app, grid, tmp_path / "out")
    for node in grid.nodes.values():
        node.online = False  # nobody is asked any more
    again = run(app, grid, tmp_path / "out", resume=True)
    pair = [{k: v for k, v in d.summary().items() if k != "peak_memory_mb"} for d in (first, again)]
    assert pair[0] == pair[1]


def test_more_rounds_may_be_added(tmp_path: Path) -> None:
    federation = classification(3)
    app, grid = deployed(tmp_path / "app", federation, small_mlp(), {"name": "ditto"}, rounds=2)
    run(app, grid, tmp_path / "out")
    app, grid = deployed(tmp_path / "app", federation, small_mlp(), {"name": "ditto"}, rounds=4)
    longer = run(app, grid, tmp_path / "out", resume=True)
    app, grid = deployed(tmp_path / "whole", federation, small_mlp(), {"name": "ditto"}, rounds=4)
    whole = run(app, grid, tmp_path / "whole-out")
    assert longer.lines[-1]["personal"] == whole.lines[-1]["personal"]


def test_other_settings_or_another_model_are_refused(tmp_path: Path) -> None:
    app, grid = deployed(tmp_path / "app", classification(3), small_mlp(), {"name": "ditto"})
    run(app, grid, tmp_path / "out")
    with pytest.raises(EquipoiseError, match="already holds a run"):
        run(app, grid, tmp_path / "out")
    other, grid = deployed(tmp_path / "app", classification(3), small_mlp(), {"name": "ditto", "lam": 3.0})
    with pytest.raises(EquipoiseError, match=r"had algorithm\.lam"):
        run(other, grid, tmp_path / "out", resume=True)
    other, grid = deployed(tmp_path / "app", classification(3), nn.Linear(5, 3), {"name": "ditto"})
    with pytest.raises(EquipoiseError, match="cannot be resumed: the model's parameters have other names or shapes"):
        run(other, grid, tmp_path / "out", resume=True)


def test_models_by_name_can_be_loaded_where_they_were_trained(tmp_path: Path) -> None:
    """Every client finds its own model on its disk, the server the global one; no other file is needed."""
    app, grid = deployed(tmp_path / "app", classification(3), None, {"name": "ditto"}, model={"name": "softmax"})
    run(app, grid, tmp_path / "out")
    for node in grid.nodes.values():
        (file,) = Path(node.settings["state"]).glob("*/personal.safetensors")
        assert sum(p.numel() for p in load_model(file).parameters()) == 18
    assert sum(p.numel() for p in load_model(tmp_path / "out" / "global.safetensors").parameters()) == 18
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["mode"] == "flower"
