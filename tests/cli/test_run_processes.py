"""`equipoise run --processes`, and runs that torchrun starts: ends, interruptions, losses, several machines.

Where a process is lost, and where one ends while others start, the processes are started as a user would, and by
torchrun. Elsewhere they are forked, as starting three takes longer than all that they do.
"""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.commands import ROOT, SMALL, equipoise_command, one_sentence
from tests.support.forked_commands import ForkedCommand, forked_command
from tests.support.waiting import FOREVER, LIMIT, start, until

pytestmark = pytest.mark.slow
CONTENT = SMALL.replace("clients = 6", "clients = 9").replace("participation = 3", "participation = 7")
CONTENT += '[engine]\nmode = "threads"\n'  # so few clients would be one stack, and so the business of one process


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, without any disturbance."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "small.toml").write_text(CONTENT.format(rounds=12, name="ditto"))
    done = equipoise_command("run", "small.toml", "--out", "run", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def assert_same(one: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "clients.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def lines(run: Path) -> int:
    return (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0


def processes_of(parent: int) -> dict[int, int]:
    """Return the process number of each rank among the children of a process."""
    found = {}
    for path in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        words = Path(f"/proc/{path}/environ").read_bytes().split(b"\0")
        found |= {int(word[5:]): int(path) for word in words if word.startswith(b"RANK=")}
    return found


def command(*more: object) -> list[object]:
    return [sys.executable, "-m", "equipoise", "run", "small.toml", "--out", "run", "--quiet", *more]


def begin(folder: Path, rounds: int, *more: object) -> "subprocess.Popen[str]":
    (folder / "small.toml").write_text(CONTENT.format(rounds=rounds, name="ditto"))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return start(command(*more), cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)


def begin_forked(folder: Path) -> ForkedCommand:
    (folder / "small.toml").write_text(CONTENT.format(rounds=FOREVER, name="ditto"))
    return ForkedCommand(*command("--processes", 2)[3:], cwd=folder)


def test_a_killed_process_ends_the_run_with_one_sentence_and_it_resumes_to_the_same_bytes(
    tmp_path: Path, alone: Path
) -> None:
    run = begin(tmp_path, FOREVER, "--processes", 2)
    until(lambda: lines(tmp_path / "run") >= 3, run)
    children = processes_of(run.pid)
    os.kill(children[1], signal.SIGKILL)
    _, complaint = run.communicate(timeout=LIMIT)
    assert run.returncode == 1
    assert "Traceback" not in complaint
    assert "equipoise: process 1 of the run was ended by SIGKILL" in complaint
    assert "--resume --processes 2" in complaint
    assert not Path(f"/proc/{children[0]}").exists()
    (tmp_path / "small.toml").write_text(CONTENT.format(rounds=12, name="ditto"))
    done = [int(path.stem.split("-")[1]) for path in (tmp_path / "run" / "checkpoint").glob("round-*.json")]
    if max(done) <= 12:  # on a slow machine it has gone on for longer before it was killed
        again = forked_command(*command("--resume", "--processes", 3)[3:], cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert_same(tmp_path / "run", alone)


def test_ctrl_c_saves_all_rounds_and_tells_how_to_resume(tmp_path: Path) -> None:
    with begin_forked(tmp_path) as run:
        until(lambda: lines(tmp_path / "run") >= 3 or not run.process.is_alive())
        run.interrupt()
        assert run.wait() == 130, run.said()
    said = run.said()
    assert "Traceback" not in said
    assert "all rounds are saved; resume with:" in said
    assert "--resume --processes 2" in said
    newest = max((tmp_path / "run" / "checkpoint").glob("round-*.json"))
    assert int(newest.stem.split("-")[1]) == lines(tmp_path / "run")


def test_processes_do_not_outlive_the_one_that_started_them(tmp_path: Path) -> None:
    with begin_forked(tmp_path) as run:
        until(lambda: lines(tmp_path / "run") >= 1 or not run.process.is_alive())
        children = run.children()
        assert len(children) == 2, run.said()
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_mistakes_are_one_sentence_whichever_process_finds_them(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONTENT.format(rounds=2, name="ditto"))
    given = ["run", "small.toml", "--out", "run", "--processes"]
    one_sentence(equipoise_command(*given, 65, cwd=tmp_path), 2, "--processes 65", "64 shards")
    wrong = equipoise_command(*given, 2, "--set", "algorithm.lrr=1", cwd=tmp_path)
    one_sentence(wrong, 2, "algorithm.lrr", "did you mean")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    full = forked_command(*given, 2, cwd=tmp_path)
    one_sentence(full, 2, "is not empty and not a run")
    assert full.stderr.count("equipoise: ") == 1


def test_an_error_of_all_processes_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONTENT.format(rounds=4, name="fedavg"))
    given = [*command("--processes", 2, "--set", "algorithm.lr=1e30", "--set", "model.name=mlp")[3:]]
    done = forked_command(*given, cwd=tmp_path)
    one_sentence(done, 1, "every client's update has NaN or infinite numbers")
    assert done.stderr.count("every client's update") == 1


def test_processes_that_cannot_meet_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.toml").write_text(CONTENT.format(rounds=2, name="ditto"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonexistent")
    done = forked_command(*command("--processes", 2)[3:], cwd=tmp_path)
    one_sentence(done, 2, "cannot join the others", "GLOO_SOCKET_IFNAME")


def test_children_end_although_their_parent_ended_while_they_started(tmp_path: Path) -> None:
    run = begin(tmp_path, FOREVER, "--processes", 2)
    until(lambda: len(processes_of(run.pid)) == 2, run)
    children = processes_of(run.pid).values()
    run.kill()
    run.communicate(timeout=LIMIT)
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_the_data_folder_of_a_run_is_found_by_all_processes(tmp_path: Path) -> None:
    data = tmp_path / "elsewhere"
    for client in range(3):
        (data / "sites").mkdir(parents=True, exist_ok=True)
        rows = "\n".join(f"{k % 5},{(k * client) % 7},{k % 2}" for k in range(20))
        (data / "sites" / f"c{client}.csv").write_text(f"a,b,label\n{rows}\n")
    text = 'rounds = 2\n[data]\nname = "folder"\npath = "sites"\ntarget = "label"\n[model]\nname = "softmax"\n'
    (tmp_path / "own.toml").write_text(text + '[algorithm]\nname = "ditto"\n')
    given = ["run", "own.toml", "--data", "elsewhere", "--out", "first", "--quiet"]
    first = equipoise_command(*given, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    again = forked_command("run", "first/run.toml", "--out", "second", "--processes", 2, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert_same(tmp_path / "first", tmp_path / "second")


def torchrun(*options: object) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", *command()[2:]]


def test_torchrun_starts_a_run_and_restarts_it_when_a_process_is_lost(tmp_path: Path, alone: Path) -> None:
    (tmp_path / "small.toml").write_text(CONTENT.format(rounds=12, name="ditto"))
    options = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", 0.2]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = start(torchrun(*options), cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: lines(tmp_path / "run") >= 1, run)
    # torchrun's own child starts the processes; the one that is killed may already be done.
    for child in list(processes_of(run.pid).values())[1:]:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, said = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, said
    assert_same(tmp_path / "run", alone)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with addresses of their own, joined by a cable."""
    ip, name = shutil.which("ip"), f"eq{uuid.uuid4().hex[:6]}"
    hosts = [f"{name}a", f"{name}b"]
    commands = [
        *(f"netns add {host}" for host in hosts),
        f"link add {hosts[0]} netns {hosts[0]} type veth peer name {hosts[1]} netns {hosts[1]}",
        *(f"-n {host} addr add 10.77.0.{k}/24 dev {host}" for k, host in enumerate(hosts, 1)),
        *(f"-n {host} link set {device} up" for host in hosts for device in (host, "lo")),
    ]
    try:
        for words in commands if ip else []:
            done = subprocess.run([ip, *words.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")
        if ip is None:
            pytest.skip("network namespaces cannot be made here: there is no program `ip`")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts if ip else []:
            subprocess.run([ip, "netns", "del", host], capture_output=True)


def test_two_machines_with_a_common_folder_give_the_same_bytes(
    tmp_path: Path, alone: Path, two_hosts: tuple[str, str]
) -> None:
    (tmp_path / "small.toml").write_text(CONTENT.format(rounds=12, name="ditto"))
    runs = []
    for number, host in enumerate(two_hosts):
        where = ["--nnodes", 2, "--node-rank", number, "--nproc-per-node", 1]
        where += ["--master-addr", "10.77.0.1", "--master-port", 29517, "--local-addr", f"10.77.0.{number + 1}"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": host}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        runs.append(start(["ip", "netns", "exec", host, *torchrun(*where)], cwd=tmp_path, env=env, **pipes))
    for run in runs:
        _, said = run.communicate(timeout=LIMIT)
        assert run.returncode == 0, said
    assert_same(tmp_path / "run", alone)
