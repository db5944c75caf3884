"""Runs that an older version began: settings that it did not know, or named otherwise, are no obstacle."""

import tomllib
from pathlib import Path

import tomli_w

from equipoise.storage.run_folder import RunFolder
from equipoise.storage.run_index import find_runs
from tests.support.commands import equipoise_command, small


def begun_by_an_older_version(folder: Path) -> None:
    (folder / "small.toml").write_text(tomli_w.dumps(small(rounds=1)))
    assert equipoise_command("run", "small.toml", "--out", "run", "--quiet", cwd=folder).returncode == 0
    config = RunFolder(folder / "run").config
    tables = tomllib.loads(config.read_text(encoding="utf-8"))
    tables["written"]["equipoise"] = "0.1.0"
    tables["engine"]["dtype"] = tables["engine"].pop("precision")
    for key in ("weight_decay", "schedule", "nesterov", "drop_last"):
        del tables["algorithm"][key]
    config.write_text(tomli_w.dumps(tables))


def test_they_are_resumed_and_compared(tmp_path: Path) -> None:
    begun_by_an_older_version(tmp_path)
    assert find_runs([tmp_path / "run"])[0].config["engine.precision"] == "float32"
    again = ["run", "small.toml", "--out", "run", "--quiet", "--resume", "--set", "rounds=3"]
    other = equipoise_command(*again, "--set", "engine.precision=float64", cwd=tmp_path)
    assert other.returncode == 2
    assert "had engine.precision = 'float32', not 'float64'" in other.stderr
    done = equipoise_command(*again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 3
