"""Random files, tables and messages: each works, or is refused with one short sentence."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.commands import ROOT
from tests.support.fuzzing import TARGETS, run_case
from tests.support.waiting import LIMIT


@pytest.mark.parametrize("target", TARGETS)
@given(seed=st.integers(0, 2**64 - 1))
@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
def test_it_works_or_is_refused_with_a_sentence(target: str, seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run_case(target, random.Random(seed), folder, LIMIT)


@pytest.mark.slow
def test_the_command_limits_memory_and_finds_what_fails(tmp_path: Path) -> None:
    """A process of `benchmarks/fuzz.py`: one line per case, none of which fails."""
    command = [sys.executable, str(ROOT / "benchmarks" / "fuzz.py"), "--work", "models", "--seed", "3", "--turn", "2"]
    done = subprocess.run(
        [*command, "--keep", str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    ready, *cases = done.stdout.splitlines()
    assert ready == "ready"
    assert cases
    assert {line.split()[1] for line in cases} <= {"accepted", "refused"}
    assert list(tmp_path.iterdir()) == []
