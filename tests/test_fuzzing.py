"""Random files, tables and messages: each works, or is refused with one short sentence."""

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
