"""One simulation in several processes gives the same bytes as in one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.distributed.ranks import Ranks
from equipoise.runs.local_processes import process_environment
from tests.support.commands import ROOT
from tests.support.process_runs import cases, run_case
from tests.support.run_bytes import assert_same
from tests.support.waiting import LIMIT

CASES = cases()
EVERY_ALGORITHM = [case for case in CASES if case.endswith((" threads", " stacked"))]
pytestmark = pytest.mark.slow


def in_processes(count: int, folder: Path, *arguments: object) -> None:
    """Run cases in as many processes."""
    meeting = folder / "meeting"
    meeting.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.support.process_runs", str(folder), *map(str, arguments)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=process_environment(rank, count, meeting), stderr=subprocess.PIPE)
        for rank in range(count)
    ]
    try:
        for process in processes:
            _, complaint = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, complaint.decode()
    finally:
        for process in processes:
            process.kill()
    shutil.rmtree(meeting)


def test_several_processes_give_the_bytes_of_one(tmp_path: Path) -> None:
    """One test, because starting processes takes long; with four, only what is the algorithms' doing."""
    for name, given in CASES.items():
        run_case(given, tmp_path / "1" / name, Ranks())
    in_processes(2, tmp_path / "2", "new", 0)
    in_processes(4, tmp_path / "4", "new", 0, *EVERY_ALGORITHM)
    for case in CASES:
        assert_same(tmp_path / "1" / case, tmp_path / "2" / case)
    for case in EVERY_ALGORITHM:
        assert_same(tmp_path / "1" / case, tmp_path / "4" / case)


def test_a_run_is_resumed_with_another_number_of_processes_to_the_same_bytes(tmp_path: Path) -> None:
    some = ["ditto threads", "flame threads", "learn2pfed threads", "flame local", "callbacks", "ditto stacked"]
    in_processes(3, tmp_path / "three", "new", 2, *some)
    shutil.copytree(tmp_path / "three", tmp_path / "two")
    in_processes(2, tmp_path / "two", "resume", 4, *some)
    for case in some:
        run_case(CASES[case], tmp_path / "three" / case, Ranks(), new=False, rounds=4)
        assert_same(tmp_path / "three" / case, tmp_path / "two" / case)
        run_case(CASES[case], tmp_path / "one" / case, Ranks(), rounds=4)
        assert_same(tmp_path / "one" / case, tmp_path / "two" / case)
    in_processes(2, tmp_path / "two", "back", 4, *some)
    for case in some:
        assert_same(tmp_path / "one" / case, tmp_path / "two" / case)
