"""Runs on a device, from Python and from the command line: what is written, what comes back, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.config.experiment import Experiment
from equipoise.errors import EquipoiseError
from equipoise.runs.launch import reopen, run
from equipoise.storage.run_folder import read_toml
from tests.support.commands import ROOT
from tests.support.problems import classification, metrics, registered, simulation, small_mlp

TABLES: dict[str, Any] = {
    "rounds": 2,
    "participation": 3,
    "data": {"name": "digits-by-writer", "clients": 4},
    "model": {"name": "softmax"},
    "algorithm": {"name": "ditto", "lr": 0.1, "batch": 8},
}


def trained(device: str, out: Path | None = None, **options: Any) -> eq.Result:
    settings: dict[str, Any] = {"rounds": 2, "precision": "float64", "out": out, "progress": False, **options}
    return eq.train(small_mlp(), classification(), registered("ditto"), device=device, **settings)


def test_results_are_on_the_cpu_and_the_same(stand_in: str, tmp_path: Path) -> None:
    there, here = trained(stand_in, tmp_path / "run"), trained("cpu")
    x = torch.randn(4, 5, dtype=torch.float64)
    for result in (there, eq.load_result(tmp_path / "run", small_mlp(seed=5))):
        for one, other in ((result.personal(2), here.personal(2)), (result.global_model(), here.global_model())):
            assert {t.device.type for t in one.state_dict().values()} == {"cpu"}
            torch.testing.assert_close(one(x), other(x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(result.predict(1, x), here.predict(1, x), rtol=1e-9, atol=1e-9)
        adapted, expected = (r.adapt({"new": (x.numpy(), np.array([0, 1, 2, 0]))}) for r in (result, here))
        np.testing.assert_allclose(adapted.scores()["personal"], expected.scores()["personal"], rtol=1e-9)
    written = read_toml(tmp_path / "run" / "run.toml")
    assert written["written"]["device"] == f"{stand_in}:0"
    assert written["engine"]["device"] == stand_in
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["device"] == f"{stand_in}:0"
    assert here.summary["device"] == "cpu"


def test_neighbours_are_looked_up_where_the_model_is(stand_in: str) -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    found = [
        eq.train(small_mlp(), classification(), registered("knn-per"), rounds=1, precision="float64", device=device)
        for device in (stand_in, "cpu")
    ]
    one, other = (result.personal(3)(x) for result in found)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_best_models_are_kept_on_the_host(stand_in: str, tmp_path: Path) -> None:
    result = trained(stand_in, tmp_path / "run", callbacks=["best-model"])
    best, expected = result.best(2), trained("cpu", callbacks=["best-model"]).best(2)
    assert best is not None
    assert expected is not None
    for name, tensor in best.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-9, atol=1e-9)


@pytest.fixture
def on_stand_in(stand_in: str, tmp_path: Path) -> Path:
    run(Experiment.parse({**TABLES, "engine": {"device": stand_in}}), tmp_path / "run")
    return tmp_path / "run"


def test_a_run_may_be_resumed_elsewhere_and_says_where_it_was(on_stand_in: Path) -> None:
    assert read_toml(on_stand_in / "run.toml")["written"]["device"] == "standin:0"
    longer = Experiment.parse({**TABLES, "rounds": 3, "engine": {"device": "cpu"}})
    assert run(longer, on_stand_in, resume=True).summary["rounds"] == 3
    assert read_toml(on_stand_in / "run.toml")["written"]["device"] == "cpu"


def test_a_finished_run_is_opened_where_its_device_is_not(on_stand_in: Path) -> None:
    text = (on_stand_in / "run.toml").read_text()
    (on_stand_in / "run.toml").write_text(text.replace('device = "standin"', 'device = "xpu"'))
    result, _ = reopen(on_stand_in)
    assert result.summary["device"] == "cpu"
    assert result.personal(0) is not None


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError, match=r"engine\.device = 'xpu' is not available here"):
        run(Experiment.parse({**TABLES, "engine": {"device": "xpu"}}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(EquipoiseError, match=r"engine\.device = 'gpu' is not a device of PyTorch"):
        trained("gpu")


_KILLED = """
    import sys
    from pathlib import Path
    import pytest
    from tests.support import stand_in
    from tests.support.problems import registered, simulation

    stand_in.load()
    with pytest.MonkeyPatch.context() as patch, stand_in.in_this_thread(patch):
        run = simulation(
            registered("flame"), folder=Path(sys.argv[1]), device=stand_in.DEVICE, rounds=9, checkpoint_every=2
        )
        log = run.log
        def told(line, timing):
            log(line, timing)
            print(line["round"], flush=True)
            if line["round"] == 5:  # killed here, or anywhere in the two rounds before
                sys.stdin.read()
        run.log = told
        run.run()
"""


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bytes(stand_in: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 9, "checkpoint_every": 2, "device": stand_in}
    simulation(registered("flame"), folder=tmp_path / "whole", **options).run()
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_KILLED), str(tmp_path / "killed")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 3:
            break
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    resumed = simulation(registered("flame"), folder=tmp_path / "killed", new=False, **options)
    resumed.resume()
    assert 1 < resumed.done < 6
    resumed.run()
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
