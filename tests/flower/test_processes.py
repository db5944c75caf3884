"""Programs that run beside this one: started, watched, and gone when they should be."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import equipoise
from equipoise.errors import EquipoiseError
from equipoise.flower import keeper
from equipoise.flower import processes as module
from equipoise.flower.processes import Processes, free_ports
from tests.support.waiting import LIMIT, start, until

pytestmark = pytest.mark.deployment

# They live longer than any test waits, and not for ever, whatever goes wrong here.
# A program that starts two others, one of them, like Flower's, in a session of its own.
FAMILY = ["sh", "-c", "sleep 1000 & one=$!; setsid sleep 1000 & echo $$ $one $!; wait"]
# Nobody here heeds a request to end.
STUBBORN = ["sh", "-c", "trap '' TERM; sleep 1000 & one=$!; setsid sleep 1000 & echo $$ $one $!; wait"]


@pytest.fixture
def found(tmp_path: Path) -> Iterator[list[int]]:
    """Processes that a test has seen; those that it should have ended and did not are ended here."""
    seen: list[int] = []
    yield seen
    for pid in [*seen, *marked(str(tmp_path))]:
        if lives(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    """It is there, and not only waiting for somebody to hear of its end."""
    try:
        after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return after.split()[0] not in ("Z", "X")


def gone(pids: list[int]) -> None:
    """All of them, long before they would have ended by themselves."""
    assert pids
    until(lambda: not any(map(lives, pids)))


def numbers(log: Path, count: int = 3) -> list[int]:
    """The process numbers that a program tells in its log, once it has told all."""
    until(lambda: log.exists() and log.read_text().endswith("\n") and len(log.read_text().split()) >= count)
    return [int(word) for word in log.read_text().split()]


def family(started: Processes, found: list[int], *names: str, command: list[str] = FAMILY) -> None:
    """Start a program that starts two others, under each of these names."""
    for name in names:
        started.start(name, command)
    for name in names:
        found += numbers(started.logs / f"{name}.log")
    assert len(found) == 3 * len(names)
    assert all(map(lives, found))


def test_all_are_gone_after_the_block(tmp_path: Path, found: list[int]) -> None:
    with Processes(tmp_path / "deep" / "logs", {}) as started:
        family(started, found, "one", "two")
        assert started.dead() == []
    gone(found)
    assert started.running == {}
    started.end()  # a second time does nothing


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_all_are_gone_when_the_block_raises(error: type[BaseException], tmp_path: Path, found: list[int]) -> None:
    def work() -> None:
        with Processes(tmp_path, {}) as started:
            family(started, found, "one")
            raise error

    with pytest.raises(error):
        work()
    gone(found)


def test_those_that_will_not_end_are_killed(tmp_path: Path, found: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    with Processes(tmp_path, {}) as started:
        family(started, found, "one", "two", command=STUBBORN)
        begin = time.monotonic()
    assert 0.2 <= time.monotonic() - begin < LIMIT, "they were asked first, and then not asked any more"
    gone(found)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The requests to end that have reached this process."""
    numbers: list[int] = []
    before = {n: signal.signal(n, lambda number, _: numbers.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_ctrl_c_does_not_break_off_the_end(
    heard: list[int], tmp_path: Path, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)

    def impatient(process: Any) -> None:
        ask()
        release(process)

    release = module._KeptProcess.release
    with Processes(tmp_path, {}) as started:
        family(started, found, "one")
        monkeypatch.setattr(module._KeptProcess, "release", impatient)
    gone(found)
    assert heard == []
    ask()
    assert heard == [signal.SIGINT, signal.SIGTERM], "afterwards all is as before"


# It writes without a buffer: the signal may come while `ready` is still being printed.
ORDERLY = """
import os, signal, time

def end(*_):
    time.sleep(0.3)
    os.write(1, b"in order\\n")
    raise SystemExit

signal.signal(signal.SIGTERM, end)
os.write(1, b"ready\\n")
time.sleep(1000)
"""


def test_those_that_end_in_order_have_the_time_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", LIMIT)
    with Processes(tmp_path, {}) as started:
        started.start("one", [sys.executable, "-I", "-c", ORDERLY])
        until(lambda: (tmp_path / "one.log").read_text() == "ready\n")
    assert (tmp_path / "one.log").read_text() == "ready\nin order\n"


def test_those_that_others_started_have_the_time_to_end_in_order_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", LIMIT)
    script = f"setsid '{sys.executable}' -I -c '{ORDERLY}' & exec sleep 1000"
    with Processes(tmp_path, {}) as started:
        started.start("one", ["sh", "-c", script])
        until(lambda: (tmp_path / "one.log").read_text() == "ready\n")
    assert (tmp_path / "one.log").read_text() == "ready\nin order\n"


# A program that starts others as Flower does and worse: in sessions of their own, some of them orphans at once, one
# that heeds no signal, and one that keeps starting others.
FUGITIVES = """
import os, signal, sys, time

def spawn(work, depth):
    if os.fork():
        return
    os.setsid()
    if depth:
        spawn(work, depth - 1)
        os._exit(0)
    work()

def sleep():
    print(os.getpid(), flush=True)
    time.sleep(1000)

def stubborn():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sleep()

def restless():
    end = time.monotonic() + 100
    while time.monotonic() < end:
        if os.fork() == 0:
            time.sleep(0.05)
            os._exit(0)
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        time.sleep(0.01)

for depth in range(3):
    spawn(sleep, depth)
spawn(stubborn, 1)
spawn(restless, 1)
sleep()
"""

# The packages without what their __init__ brings along: PyTorch takes seconds.
PARENT = """
import sys, time, types
from pathlib import Path
for name in ("equipoise", "equipoise.flower"):
    package = types.ModuleType(name)
    package.__path__ = [str(Path(sys.argv[1]).joinpath(*name.split(".")))]
    sys.modules[name] = package
from equipoise.flower.processes import Processes
with Processes(Path(sys.argv[2]), {"FAMILY": sys.argv[2]}) as started:
    for name in ("one", "two"):
        started.start(name, [sys.executable, "-IS", "-c", sys.argv[3]])
    time.sleep(1000)
"""


def marked(mark: str) -> list[int]:
    """The processes that were started with this mark in their environment, wherever they belong now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"FAMILY={mark}\0".encode() in (folder / "environ").read_bytes() and lives(int(folder.name)):
                found.append(int(folder.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to a process of our choice")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_nothing_outlives_us_when_we_are_killed(number: int, tmp_path: Path, found: list[int]) -> None:
    package = Path(equipoise.__file__).parent.parent
    command = [sys.executable, "-c", PARENT, str(package), str(tmp_path), FUGITIVES]
    with subprocess.Popen(command) as parent:
        try:
            for name in ("one", "two"):
                found += numbers(tmp_path / f"{name}.log", 5)
            assert all(map(lives, found))
        finally:
            parent.send_signal(number)
    assert parent.returncode == -number
    gone(found)
    until(lambda: not marked(str(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to a process of our choice")
def test_fugitives_are_ended_with_the_block(tmp_path: Path, found: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    with Processes(tmp_path, {"FAMILY": str(tmp_path)}) as started:
        started.start("one", [sys.executable, "-IS", "-c", FUGITIVES])
        found += numbers(tmp_path / "one.log", 5)
    assert marked(str(tmp_path)) == []


OWNED = [sys.executable, "-IS", keeper.__file__, "-"]
# A program that has started another in a session of its own, and ends with 5 when it is asked to.
ASKED = ["sh", "-c", "trap 'exit 5' TERM INT; setsid sleep 1000 & echo $$ $!; while :; do sleep 0.05; done"]


def owned(found: list[int], *command: str) -> "subprocess.Popen[str]":
    """Start a program below a keeper that is its own owner."""
    process = start([*OWNED, *command], stdout=subprocess.PIPE)
    assert process.stdout is not None
    found += map(int, process.stdout.readline().split())
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to a process of our choice")
def test_what_a_service_has_started_ends_with_it(found: list[int]) -> None:
    with owned(found, *ASKED) as process:
        os.kill(found[0], signal.SIGKILL)
        assert process.wait(LIMIT) == 128 + signal.SIGKILL
        assert not any(map(lives, found)), "once it counts as ended"
    with owned(found, *ASKED) as process:
        [middle] = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        os.kill(middle, signal.SIGKILL)
        assert process.wait(LIMIT) == 128 + signal.SIGKILL
        assert not any(map(lives, found)), "also if the keeper itself is killed"
    assert subprocess.run([*OWNED, "sh", "-c", "exit 7"]).returncode == 7
    assert subprocess.run([*OWNED, "/no/program"], capture_output=True).returncode == 127


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to a process of our choice")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_service_gets_the_signals_and_its_exit_code_is_passed_on(number: int, found: list[int]) -> None:
    with owned(found, *ASKED) as process:
        process.send_signal(number)
        assert process.wait(LIMIT) == (-number if number == signal.SIGKILL else 5)
    gone(found)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to a process of our choice")
def test_a_service_ignores_what_it_was_told_to_ignore(found: list[int]) -> None:
    """As nohup does."""
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *OWNED, "sh", "-c", "echo $$; read line; exit 6"]
    with start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found.append(int(process.stdout.readline()))
        process.send_signal(signal.SIGHUP)
        process.communicate("go on\n", timeout=LIMIT)
    assert process.returncode == 6


def test_a_program_is_found_among_those_that_another_started(tmp_path: Path) -> None:
    (tmp_path / "flwr-something").write_text("#!/bin/sh\nexec 2>/dev/null\nread line < wait\n")
    (tmp_path / "flwr-something").chmod(0o755)
    os.mkfifo(tmp_path / "wait")
    with Processes(tmp_path, {}) as started:
        started.start("one", ["sh", "-c", f"cd '{tmp_path}'; sleep 0.2; ./flwr-something; sleep 1000"])
        until(lambda: started.descendant("one", "flwr-something") is not None)
        seen = started.descendant("one", "flwr-something")
        assert seen is not None
        assert started.descendant("one", "flwr-other") is None
        assert not module.ended(seen)
        (tmp_path / "wait").write_text("go on\n")
        until(lambda: module.ended(seen))
        assert started.dead() == []


def test_ctrl_c_is_for_us_alone(tmp_path: Path) -> None:
    """Each has a session of its own, so that the terminal's signals do not reach it."""
    with Processes(tmp_path, {}) as started:
        started.start("one", ["sleep", "1000"])
        [process] = started.running.values()
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)


@pytest.fixture
def keyboard() -> Iterator[None]:
    """Standard input of this process at which nobody types."""
    before, (end, other) = os.dup(0), os.pipe()
    os.dup2(end, 0)
    yield
    os.dup2(before, 0)
    for descriptor in (before, end, other):
        os.close(descriptor)


@pytest.mark.usefixtures("keyboard")
def test_nobody_reads_our_input(tmp_path: Path) -> None:
    with Processes(tmp_path, {}) as started:
        started.start("one", ["sh", "-c", "cat; echo nothing to read"])
        assert started.call(["sh", "-c", "timeout 300 cat && echo nothing to read"]) == "nothing to read\n"
        until(lambda: started.dead() == ["one"])
    assert (tmp_path / "one.log").read_text() == "nothing to read\n"


def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path, found: list[int]) -> None:
    with Processes(tmp_path / "logs", {}) as started:
        started.start("parent", ["sh", "-c", "sleep 1000 & echo $!; setsid sleep 1000 & echo $!"])
        found += numbers(tmp_path / "logs" / "parent.log", 2)
        until(lambda: started.dead() == ["parent"])
        assert not any(map(lives, found)), "once it counts as ended"


def test_who_has_ended_is_told(tmp_path: Path) -> None:
    with Processes(tmp_path, {}) as started:
        started.start("long", ["sleep", "1000"])
        started.start("short", ["sh", "-c", "echo out; echo err >&2; exit 1"])
        until(lambda: started.dead() == ["short"])
        assert started.tail("short") == "out err"
        assert started.tail("short", 1) == "err"
        assert started.tail("long") == ""


def test_logs_of_an_earlier_start_stay(tmp_path: Path) -> None:
    for word in ("first", "second"):
        with Processes(tmp_path, {}) as started:
            started.start("one", ["echo", word])
            until(lambda: started.dead() == ["one"])
    assert (tmp_path / "one.log").read_text() == "first\nsecond\n"


# Ports


def test_free_ports_are_free_and_different() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_program_that_listens_is_awaited(tmp_path: Path) -> None:
    [port] = free_ports(1)
    script = (
        f"import socket, time; time.sleep(0.2); server = socket.create_server(('127.0.0.1', {port})); time.sleep(1000)"
    )
    with Processes(tmp_path, {}) as started:
        started.start("server", [sys.executable, "-I", "-c", script])
        started.await_port("server", port, seconds=LIMIT)
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT)


def test_a_program_that_dies_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    [port] = free_ports(1)
    script = "for i in 1 2 3 4 5; do echo line $i; done; printf '  the port\\n is taken \\377\\n' >&2; exit 1"
    with Processes(tmp_path, {}) as started:
        started.start("server", ["sh", "-c", script])
        begin = time.monotonic()
        with pytest.raises(EquipoiseError) as caught:
            started.await_port("server", port, seconds=LIMIT)
        assert time.monotonic() - begin < LIMIT, "nobody waits for the dead"
    assert str(caught.value) == (
        f"server did not start; its log in {tmp_path} ends with: line 3 line 4 line 5 the port is taken \ufffd"
    )


def test_a_program_that_never_listens_is_not_awaited_for_ever(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with Processes(tmp_path, {}) as started:
        started.start("server", ["sh", "-c", "echo still thinking; exec sleep 1000"])
        until(lambda: started.tail("server") != "")
        with pytest.raises(EquipoiseError, match=r"^server did not start; .* ends with: still thinking$"):
            started.await_port("server", port, seconds=0.3)
        assert started.dead() == []


# Programs that are run to their end


def test_a_program_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_CALL", 0.2)
    with (
        Processes(tmp_path, {}) as started,
        pytest.raises(EquipoiseError, match=r"^sleep 1000 did not end within 0\.2 seconds$"),
    ):
        started.call(["sleep", "1000"])


def test_what_a_program_prints_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("CHANGED", "before")
    (tmp_path / "there").mkdir()
    with Processes(tmp_path / "logs", {"CHANGED": "after", "NEW": "new"}) as started:
        script = "echo $KEPT $CHANGED $NEW; pwd; echo a warning >&2; cat"
        printed = started.call(["sh", "-c", script], cwd=tmp_path / "there")
        assert printed == f"kept after new\n{tmp_path / 'there'}\n"
        assert started.running == {}
        # Programs that were installed with this Python are found first.
        assert started.call(["sh", "-c", "echo $PATH"]).split(":")[0] == str(Path(sys.executable).parent)


def test_a_program_that_fails_is_told_in_a_sentence(tmp_path: Path) -> None:
    script = "for i in 1 2 3 4 5 6; do echo line $i; done; echo; echo no such node >&2; exit 4"
    with Processes(tmp_path, {}) as started, pytest.raises(EquipoiseError) as caught:
        started.call(["/bin/sh", "-c", script])
    sentence = str(caught.value)
    assert sentence == "sh -c failed: line 4 line 5 line 6  no such node"


def test_a_program_that_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    with Processes(tmp_path, {}) as started:
        for start in (started.call, lambda command: started.start("one", command)):
            with pytest.raises(EquipoiseError, match=r"^there is no program flower-nothing; is equipoise\[flower\]"):
                start(["flower-nothing"])
