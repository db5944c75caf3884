"""Sweeps of runs that callbacks end at different rounds."""

from pathlib import Path

import pytest
import tomli_w

from equipoise.runs import sweep
from equipoise.runs.sweep import expand_sweep, grid
from equipoise.storage.model_kinds import KINDS
from equipoise.storage.run_folder import RunFolder
from equipoise.storage.run_index import find_runs, grouped
from tests.support.commands import equipoise_command, small
from tests.support.forked import forked_workers

STOP = {"name": "early-stopping", "patience": 1}
ALIKE = [{"name": "fedavg", "lr": 0.1}, {"name": "fedavg-ft", "lr": 0.1}]


def test_callbacks_are_one_value_and_lists_of_them_are_several() -> None:
    assert [each["callbacks"] for each in grid({"seed": [0, 1], "callbacks": [STOP, STOP]})] == [[STOP, STOP]] * 2
    assert [each["callbacks"] for each in grid({"callbacks": [[], [STOP]]})] == [[], [STOP]]
    every, _ = expand_sweep(small(callbacks=[[], [STOP], [{**STOP, "patience": 2}], [{"name": "progress"}]]))
    assert len(every) == 3  # a run that is only watched is the same run
    [longer], _ = expand_sweep(small(callbacks=[STOP]), sets=["callbacks.patience=7"])
    assert longer.experiment.callbacks[0].table() == {"patience": 7, "min_delta": 0.0}


@pytest.mark.parametrize(("name", "lengths"), [("early-stopping", [1, 1]), ("best-model", [1, 1]), ("progress", [2])])
def test_only_runs_that_no_callback_ends_share_their_training(name: str, lengths: list[int]) -> None:
    every, _ = expand_sweep(small(algorithm=ALIKE, callbacks=[{"name": name}]))
    assert [len(chain) for chain in sweep.chains(every)] == lengths


@pytest.mark.slow
def test_runs_of_different_lengths_are_compared_plotted_and_reported(tmp_path: Path) -> None:
    tables = small(rounds=12, seed=[0, 1, 2], algorithm=[{"name": "fedavg", "lr": 0.9}, {"name": "ditto", "lr": 0.9}])
    tables |= {"callbacks": [STOP], "targets": [0.5]}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(tables))
    with forked_workers():
        done = equipoise_command("sweep", "sweep.toml", "--out", "runs", "--jobs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the run stopped after round" in " ".join(done.stderr.split())
    found = find_runs([tmp_path / "runs"])
    assert len(found) == 6
    assert len({run.summary["rounds"] for run in found}) > 1
    for run in found:
        assert run.summary["rounds"] == len(run.metrics)
        assert set(run.summary["rounds_to"]) == set(run.metrics[0]) & set(KINDS)
    assert sorted(len(group) for group in grouped(found)) == [3, 3]
    for words in (
        "compare runs",
        "plot runs --kind scores --out scores.png",
        "report runs --out report.html",
        f"watch {found[0].path} --once",
    ):
        done = equipoise_command(*words.split(), cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)
    assert f"stopped early: {found[0].summary['stopped'][:40]}" in done.stdout
    again = equipoise_command("sweep", "sweep.toml", "--out", "runs", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert [RunFolder(run.path).read_summary() for run in found] == [run.summary for run in found]
