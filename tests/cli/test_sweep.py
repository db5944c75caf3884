"""`equipoise sweep --shard`: what a part prints, and that the parts make one sweep."""

import json
from pathlib import Path

import pytest
import tomli_w

from equipoise.runs.sweep import expand_sweep
from equipoise.runs.sweep_parts import divide
from equipoise.storage.run_folder import RunFolder
from equipoise.storage.sweep_choices import SWEEP
from tests.support.commands import equipoise_command, small

TABLES = small(
    seed=[0, 1],
    algorithm=[{"name": "ditto", "lr": [1e-5, 0.1]}, {"name": "local", "lr": [1e-5, 0.1]}],
    sweep={"tune": ["algorithm.lr"]},
)
PARTS = 3


@pytest.mark.slow
def test_parts_say_what_they_are_and_how_to_compare_all(tmp_path: Path) -> None:
    file = tmp_path / "many.toml"
    file.write_text(tomli_w.dumps(TABLES))
    every, sweep = expand_sweep(TABLES)
    parts = divide(every, sweep.tune, PARTS)
    assert sorted(map(len, parts)) == [0, 4, 4]
    for number, part in enumerate(parts, 1):
        done = equipoise_command("sweep", file, "--out", "parts", "--shard", f"{number}/{PARTS}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        own = "has ended; it has 4 of all 8 combinations" if part else "has no runs"
        assert f"Part {number} of {PARTS} {own}. When the other parts have ended too" in done.stdout
        assert "equipoise compare parts" in done.stdout
        names = {cell.experiment.algorithm_name for cell in part}
        assert all((name in done.stdout) == (name in names) for name in ("ditto", "local"))
    whole = equipoise_command("sweep", file, "--out", "whole", cwd=tmp_path)
    assert "Part" not in whole.stdout
    one, other = (equipoise_command("compare", folder, cwd=tmp_path).stdout for folder in ("whole", "parts"))
    assert one == other != ""
    choices = [json.loads((tmp_path / folder / SWEEP).read_text()) for folder in ("whole", "parts")]
    assert choices[0] == choices[1]
    assert len(choices[0]["chosen"]) == len(choices[0]["rejected"]) == 4
    for run in (tmp_path / "whole").glob("*-seed*"):
        metrics = [RunFolder(tmp_path / folder / run.name).metrics.read_bytes() for folder in ("whole", "parts")]
        assert metrics[0] == metrics[1]
    again = equipoise_command("sweep", file, "--out", "parts", cwd=tmp_path)  # nothing is left to do
    assert again.stdout.replace("parts", "whole") == whole.stdout
