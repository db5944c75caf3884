"""A server that is killed goes on from its last checkpoint, as if nothing had happened."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from equipoise import load_model
from equipoise.errors import EquipoiseError
from tests.support.commands import ROOT
from tests.support.flower_memory import deployed, run
from tests.support.flower_problem import OPTIONS, PROBLEM
from tests.support.problems import classification, small_mlp

SERVE = """
import os, signal, sys
from pathlib import Path
from tests.support.flower_memory import deployed, run
from tests.support.flower_problem import OPTIONS, PROBLEM

folder, at = Path(sys.argv[1]), int(sys.argv[2])
app, grid = deployed(folder / "app", *PROBLEM, **OPTIONS)
pushes = 0

def on_push(message):
    global pushes
    pushes += 1
    if pushes == at:
        os.kill(os.getpid(), signal.SIGKILL)

grid.on_push = on_push
run(app, grid, folder / "out")
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 11, 14, 22])
def test_killed_and_resumed(at: int, tmp_path: Path) -> None:
    """4 greetings, then 4 orders an exchange: killed before, in the first, in the middle and in the last one."""
    app, grid = deployed(tmp_path / "whole" / "app", *PROBLEM, **OPTIONS)
    whole = run(app, grid, tmp_path / "whole" / "out")
    killed = subprocess.run([sys.executable, "-c", SERVE, str(tmp_path), str(at)], cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    app, grid = deployed(tmp_path / "app", *PROBLEM, **OPTIONS)
    resumed = run(app, grid, tmp_path / "out", resume=True)
    assert len(whole.pipeline.malicious) == 1
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "out" / "metrics.jsonl"
    ).read_bytes()
    assert (tmp_path / "out" / "clients.csv").read_bytes() == (tmp_path / "whole" / "out" / "clients.csv").read_bytes()
    assert resumed.transport.refused == {}
    assert whole.server.keys() == resumed.server.keys()
    assert all(whole.server[k].equal(resumed.server[k]) for k in whole.server)


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
