"""One simulation in several processes gives the same bytes as in one."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from equipoise.distributed.ranks import Ranks
from equipoise.runs.local_processes import process_environment
from tests.support.forked import Forked
from tests.support.problems import KINDS
from tests.support.process_runs import cases, run_case, run_cases
from tests.support.run_bytes import assert_same

CASES = cases()
EVERY_KIND = [f"{name} {mode}" for name in KINDS for mode in ("threads", "stacked")]
pytestmark = pytest.mark.slow


def in_processes(count: int, folder: Path, *arguments: object) -> None:
    """Run cases in as many processes."""
    meeting = folder / "meeting"
    meeting.mkdir(parents=True)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                Forked(
                    folder / f"process-{rank}.log",
                    run_cases,
                    str(folder),
                    *map(str, arguments),
                    environment=process_environment(rank, count, meeting),
                )
            )
            for rank in range(count)
        ]
        for process in processes:
            assert process.wait() == 0, process.said()
    shutil.rmtree(meeting)


def test_several_processes_give_the_bytes_of_one(tmp_path: Path) -> None:
    """One test, because starting processes takes long; with four, one algorithm of each kind."""
    for name, given in CASES.items():
        run_case(given, tmp_path / "1" / name, Ranks())
    in_processes(2, tmp_path / "2", "new", 0)
    in_processes(4, tmp_path / "4", "new", 0, *EVERY_KIND)
    for case in CASES:
        assert_same(tmp_path / "1" / case, tmp_path / "2" / case)
    for case in EVERY_KIND:
        assert_same(tmp_path / "1" / case, tmp_path / "4" / case)


def test_a_run_is_resumed_with_another_number_of_processes_to_the_same_bytes(tmp_path: Path) -> None:
    some = ["ditto threads", "flame threads", "learn2pfed threads", "learn2pfed-joint threads", "flame local"]
    some += ["callbacks", "ditto stacked"]
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
