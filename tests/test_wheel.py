"""What people install is what is here."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.waiting import LIMIT


@pytest.mark.slow
def test_the_wheel_has_every_module_and_every_file_that_the_program_reads(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("equipoise", "experiments"):  # building writes into the folder, so a copy is built
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT)
    [wheel] = tmp_path.glob("*.whl")
    found = set(zipfile.ZipFile(wheel).namelist())
    inside = {str(p.relative_to(ROOT)) for p in (ROOT / "equipoise").rglob("*") if p.is_file()}
    inside = {name for name in inside if "__pycache__" not in name}
    read = [
        *ROOT.glob("experiments/*/*.toml"),
        *ROOT.glob("experiments/*/paper/*.toml"),
        *ROOT.glob("experiments/*/results/*.jsonl"),
        ROOT / "experiments/times.json",
    ]
    inside |= {f"equipoise/{path.relative_to(ROOT)}" for path in read}
    assert inside - found == set()
