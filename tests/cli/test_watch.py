"""Following a run from its folder: what is shown is what the files say."""

import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from equipoise.config.experiment import Experiment
from equipoise.reporting.live_view import RunView, clock, render
from equipoise.runs.launch import run
from equipoise.storage.run_folder import RunFolder
from tests.support.commands import SMALL, equipoise_command, small
from tests.support.forked_commands import ForkedCommand
from tests.support.waiting import FOREVER, LIMIT, start


def folder(path: Path, lines: int = 3, rounds: int = 10, **more: Any) -> RunFolder:
    """A run in the middle, as its files would be."""
    path.mkdir(parents=True)
    found = RunFolder(path)
    found.config.write_text(f'rounds = {rounds}\n[algorithm]\nname = "ditto"\n[data]\nname = "mnist"\n')
    (path / "lock").touch()
    for k in range(1, lines + 1):
        scores = {"personal": {"accuracy": k / 10, "loss": 1 / k}, "global": {"accuracy": k / 20, "loss": 2 / k}}
        found.append(found.metrics, {"round": k, **(scores if k % 2 else {})})
        slow = {"slowest": {"turtle": 2.0 * k, f"client-{k}": 1.0}}
        found.append(found.timings, {"round": k, "train": 2.0 * k, "evaluate": 1.0, **slow, **more})
    return found


def shown(look: RunView) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(look, 120, 40))
    return console.export_text()


def test_a_look_reckons_with_the_rounds_so_far(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    look = RunView.at(run.path)
    assert (look.done, look.rounds, look.state) == (3, 10, "stopped")
    assert look.seconds == 2 + 4 + 6 + 3
    assert look.left == 7 * 5
    assert look.curves() == {"personal": ([1, 3], [10, 30]), "global": ([1, 3], [5, 15])}
    assert look.slowest()[0] == ("turtle", 4.0, 3)
    text = shown(look)
    for words in ("3/10 rounds", "left 0:00:35", "personal 30%", "loss 0.3333", "turtle 4 s (3/3)", "ditto on mnist"):
        assert words in text


def test_half_a_line_is_not_read_and_a_shorter_log_is_no_error(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    with run.metrics.open("a") as file:
        file.write('{"round": 4, "perso')
    assert RunView.at(run.path).done == 3
    run.metrics.write_text("")  # as when a run that was killed is resumed from its first checkpoint
    run.timings.write_text("")
    look = RunView.at(run.path)
    assert (look.done, look.left, look.curves()) == (0, None, {})
    assert "no round is done yet" in shown(look)


def test_names_of_clients_are_only_names(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", slowest={"[red]x[/red]": 1.0, "[/]": 2.0})
    assert "[red]x[/red] 1 s" in shown(RunView.at(run.path))


def test_damaged_and_empty_files_are_no_crash(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    run.summary.write_text("")
    done = equipoise_command("watch", "run", "--once", cwd=tmp_path)
    assert done.returncode == 2
    assert "summary.json is damaged" in done.stderr
    run.summary.write_text("{}")
    run.config.write_text("")
    assert "a run on own data" in shown(RunView.at(run.path))


def test_states_are_those_of_the_lock_and_the_summary(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    with run.locked():
        assert RunView.at(run.path).state == "at work"
    assert RunView.at(run.path).state == "stopped"
    run.summary.write_text("{}")
    assert RunView.at(run.path).state == "finished"


def test_who_looks_keeps_nobody_from_working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder(tmp_path / "run")
    pauses = []
    with (run.path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as `at_work_now` does

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 2:
                fcntl.flock(file, fcntl.LOCK_UN)

        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", pause)
            with run.locked():
                assert RunView.at(run.path).working
    assert len(pauses) >= 2


def test_times_of_clients_are_written_where_each_is_worked_on_alone(tmp_path: Path) -> None:
    experiment = Experiment.parse(small(rounds=2, engine={"mode": "threads"}))
    run(experiment, tmp_path / "run")
    for line in map(json.loads, (tmp_path / "run" / "timings.jsonl").read_text().splitlines()):
        assert len(line["slowest"]) == 3
        assert sum(line["slowest"].values()) > 0
        assert list(line["slowest"].values()) == sorted(line["slowest"].values(), reverse=True)


def test_the_command_shows_the_newest_run_below_a_folder(tmp_path: Path) -> None:
    folder(tmp_path / "runs" / "old")
    os.utime(tmp_path / "runs" / "old" / "run.toml", (1, 1))
    for path in (tmp_path / "runs" / "old").iterdir():
        os.utime(path, (1, 1))
    folder(tmp_path / "runs" / "new", lines=4)
    done = equipoise_command("watch", "runs", "--once", cwd=tmp_path)
    assert done.returncode == 0
    assert "new" in done.stdout
    assert "4/10 rounds" in done.stdout


def test_a_run_that_stopped_is_said_and_one_that_never_began(tmp_path: Path) -> None:
    folder(tmp_path / "run")
    done = equipoise_command("watch", "run", cwd=tmp_path)
    assert done.returncode == 1
    assert "it stopped after round 3 of 10" in done.stderr
    done = equipoise_command("watch", "nothing", "--wait", "0.2", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no run in nothing" in done.stderr


@pytest.mark.slow
def test_a_real_run_is_followed_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL.format(rounds=60, name="fedavg"))
    with ForkedCommand("run", "run.toml", "--out", "out", "--quiet", cwd=tmp_path) as worker:
        done = equipoise_command("watch", "out", "--wait", LIMIT, "--every", "0.2", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "60/60 rounds" in done.stdout
        assert "finished" in done.stdout
        assert worker.wait() == 0


@pytest.mark.slow
def test_ctrl_c_ends_the_look_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL.format(rounds=FOREVER, name="fedavg"))
    screen, terminal = pty.openpty()  # only there it shows what it sees before it ends
    watch = [sys.executable, "-m", "equipoise", "watch", "out", "--wait", str(LIMIT), "--every", "0.2"]
    with (
        os.fdopen(screen, "rb", buffering=0) as screen_file,
        ForkedCommand("run", "run.toml", "--out", "out", "--quiet", cwd=tmp_path) as worker,
    ):
        env = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": terminal, "stderr": subprocess.PIPE}
        watcher = start(watch, cwd=tmp_path, env=env, **pipes)
        os.close(terminal)
        shown = b""
        while b"rounds" not in shown:
            assert select.select([screen_file], [], [], LIMIT)[0], "it shows nothing"
            shown += screen_file.read(4096)
        watcher.send_signal(signal.SIGINT)
        with suppress(OSError):  # the end of a terminal
            while screen_file.read(4096):
                pass
        _, said = watcher.communicate(timeout=LIMIT)
        assert watcher.returncode == 0, said
        assert "the run continues" in said
        assert worker.process.is_alive(), worker.said()


@pytest.mark.parametrize(("seconds", "text"), [(None, "?"), (0.4, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03")])
def test_times_are_told_as_clocks_do(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text
