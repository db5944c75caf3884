"""A resident process that forks for every message: what it runs is what the real program would run."""

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from equipoise.errors import EquipoiseError
from equipoise.flower.warm import launch, own_socket, shim
from equipoise.flower.warm.launch import WarmFolder
from equipoise.flower.warm.own_socket import OwnSocket
from tests.flower.test_processes import lives
from tests.support.waiting import start, until
from tests.support.warm import NAME, Installed

if not launch.available():
    pytest.skip("warm clients need Linux", allow_module_level=True)

pytestmark = pytest.mark.deployment


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """One resident process for all tests that leave it alone."""
    found = Installed(tmp_path_factory.mktemp("shared"))
    process = found.resident("numpy", "torch")
    yield found
    process.kill()
    process.wait()


@pytest.fixture
def resident(installed: Installed) -> "Iterator[subprocess.Popen[str]]":
    process = installed.resident()
    yield process
    process.kill()
    process.wait()


def pid_of(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_the_child_is_what_the_real_program_would_be(shared: Installed) -> None:
    environment = {**shared.environment, "MINE": "yes"}
    mask = os.umask(0o027)
    try:
        done = shared.call("facts", "a b", "", "--x=ä", send="some input", env=environment)
        real = shared.call("facts", "a b", "", "--x=ä", send="some input", env={**environment, "LANG": "other"})
        zone = shared.call("exit", 0, env={**environment, "TZ": "Asia/Tokyo"})
    finally:
        os.umask(mask)
    warm, cold = json.loads(done.stdout), json.loads(real.stdout)
    assert warm.pop("warm") is True
    assert cold.pop("warm") is False
    assert warm == cold
    assert warm["argv"] == [str(shared.root / "base" / "bin" / NAME), "facts", "a b", "", "--x=ä"]
    assert (warm["cwd"], warm["mine"], warm["umask"]) == (str(shared.root / "cwd"), "yes", 0o027)
    assert warm["stdin"] == "some input"
    assert (done.returncode, done.stderr) == (0, "to stderr\n")
    assert "another value of LANG" in real.stderr
    assert "another value of TZ" in zone.stderr


def test_it_ends_as_the_child_ends(shared: Installed) -> None:
    assert [shared.call("exit", code).returncode for code in (0, 3, 255)] == [0, 3, 255]
    done = shared.call("text")
    assert (done.returncode, done.stderr) == (1, "some text\n")
    done = shared.call("raise")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: in the program\n")
    done = shared.call("late")
    assert (done.returncode, done.stdout, done.stderr) == (0, "in a thread\nat exit\n", "")


def test_children_draw_different_random_numbers(shared: Installed) -> None:
    draws = [json.loads(shared.call("random").stdout) for _ in range(3)]
    for numbers in zip(*draws, strict=True):  # of random, numpy and torch
        assert len(set(numbers)) == 3


def test_a_killed_child_is_a_killed_program_and_the_next_one_runs(shared: Installed) -> None:
    process = shared.start("work", "never")
    os.kill(pid_of(process), signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert json.loads(shared.call("facts").stdout)["warm"] is True


def catches(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal."""
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_signals_reach_the_child(shared: Installed) -> None:
    process = shared.start("work", "never")
    pid = pid_of(process)
    until(lambda: catches(process.pid, signal.SIGTERM))  # before that, a signal ends the shim and so the child
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 7
    until(lambda: not lives(pid))


def test_a_child_does_not_outlive_its_shim(shared: Installed) -> None:
    process = shared.start("work", "never")
    pid = pid_of(process)
    process.kill()
    process.communicate()
    until(lambda: not lives(pid))


def test_changed_code_of_an_app_takes_effect(shared: Installed) -> None:
    for value in (1, 2):
        (shared.root / "cwd" / "app_code.py").write_text(f"VALUE = {value}")
        assert shared.call("import").stdout == f"{value} True\n"


def test_without_a_resident_process_the_real_program_runs(installed: Installed) -> None:
    done = installed.call("exit", 3)
    assert done.returncode == 3
    assert done.stderr.startswith("equipoise: this client runs cold, slower but with the same results: ")
    assert "the resident process is not running" in done.stderr
    assert "the resident process is not running" in installed.folder.cold_reason()
    assert installed.folder.cold_reason() == ""  # it is told once
    (installed.root / "base" / "bin" / NAME).unlink()
    done = installed.call("exit", 3)
    assert done.returncode == 127
    assert f"there is no program {NAME}" in done.stderr


def test_a_child_finishes_when_the_resident_process_is_killed_and_the_next_one_is_cold(
    installed: Installed, resident: "subprocess.Popen[str]"
) -> None:
    process = installed.start("work", "done")
    pid_of(process)
    resident.kill()
    resident.wait()
    (installed.root / "cwd" / "done").touch()
    process.communicate()
    assert process.returncode == 5
    done = installed.call("facts")
    assert json.loads(done.stdout)["warm"] is False
    assert "the resident process is not running" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_its_end_is_the_end_of_its_children(
    number: int, installed: Installed, resident: "subprocess.Popen[str]"
) -> None:
    process = installed.start("work", "never")
    pid = pid_of(process)
    resident.send_signal(number)
    resident.wait()
    assert not lives(pid)
    process.communicate()
    assert process.returncode == 7
    assert not (installed.folder.path / "socket").exists()


def test_a_second_signal_does_not_break_off_the_end(installed: Installed, resident: "subprocess.Popen[str]") -> None:
    process = installed.start("stubborn")
    pid = pid_of(process)
    resident.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    for number in (signal.SIGTERM, signal.SIGINT):
        resident.send_signal(number)
    assert resident.wait() == 128 + signal.SIGTERM
    assert not lives(pid)
    process.communicate()


# Modules that are imported into the resident process. It forks once after the imports, and then for every message.
BREAKING = {
    "fork": """
import os
real, calls = os.fork, []

def fork():
    calls.append(None)
    if len(calls) == 2:
        raise BlockingIOError(11, "too many processes")
    return real()

os.fork = fork
""",
    "register": """
import os, time
real, own, calls = os.pidfd_open, os.getpid(), []

def pidfd_open(pid):
    if os.getpid() != own and not calls:
        time.sleep(1000)  # the child has not begun when this process gives it up
    calls.append(None)
    if os.getpid() == own and len(calls) == 1:
        raise OSError(24, "too many open files")
    return real(pid)

os.pidfd_open = pidfd_open
""",
}


@pytest.mark.parametrize("what", BREAKING)
def test_a_child_that_cannot_be_started_costs_nothing(what: str, installed: Installed) -> None:
    (installed.root / "site" / "breaking.py").write_text(BREAKING[what])
    resident = installed.resident("breaking")
    try:
        until(lambda: "ready" in installed.log(), resident)
        files = len(os.listdir(f"/proc/{resident.pid}/fd"))
        done = installed.call("exit", 3)
        assert done.returncode == 3
        assert "too many" in done.stderr
        assert json.loads(installed.call("facts").stdout)["warm"] is True
        until(lambda: len(os.listdir(f"/proc/{resident.pid}/fd")) == files)
        assert Path(f"/proc/{resident.pid}/task/{resident.pid}/children").read_text() == ""
        resident.terminate()
        assert resident.wait() == 128 + signal.SIGTERM
    finally:
        resident.kill()
        resident.wait()


def test_a_signal_right_after_the_fork_leaves_no_child_behind(installed: Installed) -> None:
    (installed.root / "site" / "signalling.py").write_text(
        "import os, signal\nreal, calls = os.fork, []\n"
        "def fork():\n"
        "    pid = real()\n"
        "    calls.append(pid)\n"
        "    if pid and len(calls) == 2:\n"
        "        open('pid', 'w').write(str(pid))\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return pid\n"
        "os.fork = fork\n"
    )
    resident = installed.resident("signalling", cwd=installed.root)
    process = installed.start("stubborn")
    resident.wait()
    assert not lives(int((installed.root / "pid").read_text()))
    process.kill()
    process.communicate()


def test_a_folder_has_one_resident_process(
    installed: Installed, resident: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_socket, "_PATIENCE", 0.1)
    with pytest.raises(EquipoiseError, match=f"another resident process serves {installed.folder.path}; end it first"):
        OwnSocket(installed.folder.path)
    process = installed.start("work", "done")
    assert pid_of(process)
    resident.kill()
    resident.wait()
    second = OwnSocket(installed.folder.path)  # a child that is still at work does not hold the folder
    (installed.folder.path / "socket").rename(installed.folder.path / "moved")
    (installed.folder.path / "socket").touch()
    second.remove()
    assert (installed.folder.path / "socket").exists(), "it removes its own socket only"
    second.close_in_child()
    (installed.root / "cwd" / "done").touch()
    process.communicate()


def test_it_ends_with_the_supernode_however_that_ends(installed: Installed) -> None:
    code = "import sys; from pathlib import Path; from equipoise.flower.warm.launch import *; "
    code += f"folder = WarmFolder(Path({str(installed.folder.path)!r})); "
    code += "become_supernode(folder, ['sh', '-c', 'echo $PATH; exec sleep 1000'])"
    supernode = start([sys.executable, "-c", code], env=installed.environment, stdout=subprocess.PIPE)
    try:
        assert supernode.stdout is not None
        assert supernode.stdout.readline().startswith(f"{installed.folder.bin}{os.pathsep}")
        children = Path(f"/proc/{supernode.pid}/task/{supernode.pid}/children")
        until(lambda: len(children.read_text().split()) == 2, supernode)
        processes = [*map(int, children.read_text().split())]  # the resident one and the keeper
    finally:
        supernode.kill()
        supernode.communicate()
    until(lambda: not any(map(lives, processes)))


def test_a_folder_that_is_a_link_or_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "warm").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EquipoiseError, match="must be a folder, not a link"):
        WarmFolder(tmp_path / "warm").prepare()
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(EquipoiseError, match=r"warm clients need to write into the folder .*file/warm: Not a dir"):
        WarmFolder(tmp_path / "file" / "warm").prepare()


def test_replaced_packages_are_noticed_and_imported_again(installed: Installed) -> None:
    library = installed.root / "site" / "fake_library.py"
    library.write_text("VALUE = 1")
    resident = installed.resident("fake_library")
    try:
        assert installed.call("library").stdout == "1 True\n"
        library.write_text("VALUE = 22")
        done = installed.call("library")
        assert done.stdout == "22 False\n"
        assert f"{library} has changed" in done.stderr
        until(lambda: installed.call("library").stdout == "22 True\n")
        assert resident.poll() is None
    finally:
        resident.kill()
        resident.wait()


def test_a_message_in_the_middle_of_an_installation_does_not_end_it(installed: Installed) -> None:
    library = installed.root / "site" / "fake_library.py"
    library.write_text("VALUE = 1")
    resident = installed.resident("fake_library")
    try:
        assert installed.call("library").stdout == "1 True\n"
        library.write_text("VALUE = ")
        assert installed.call("exit", 3).returncode == 3
        until(lambda: "the replaced packages cannot be imported" in installed.log(), resident)
        library.write_text("VALUE = 22")
        assert installed.call("library").stdout == "22 False\n"
        until(lambda: installed.call("library").stdout == "22 True\n", resident)
    finally:
        resident.kill()
        resident.wait()


def test_closed_standard_files_stay_out_of_the_way(shared: Installed) -> None:
    """Otherwise the connection to the resident process would take their place."""
    for environment, warm in ((shared.environment, True), ({**shared.environment, "LANG": "other"}, False)):
        command = f"exec '{shared.folder.bin / NAME}' write file <&- >&- 2>&-"
        done = subprocess.run(["sh", "-c", command], env=environment, cwd=shared.root / "cwd")
        assert done.returncode == 0
        assert (shared.root / "cwd" / "file").read_text() == str(warm)


def test_notes_on_cold_clients_do_not_grow_for_ever(installed: Installed) -> None:
    notes = installed.folder.path / shim.NOTES
    notes.write_bytes(b"x" * shim.MOST_NOTES)
    installed.call("exit", 0)
    assert notes.stat().st_size == shim.MOST_NOTES


def test_it_does_not_serve_if_an_import_starts_a_thread(installed: Installed) -> None:
    (installed.root / "site" / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    )
    command = installed.folder.resident("--command", NAME, "--preload", "busy")
    done = subprocess.run(command, env=installed.environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "clients run cold: it has 2 threads after the imports" in done.stderr


@pytest.mark.parametrize(("place", "mode"), [("socket", 0o666), (".", 0o755)])
def test_a_folder_that_others_may_enter_is_not_used(
    place: str, mode: int, installed: Installed, resident: "subprocess.Popen[str]"
) -> None:
    until(lambda: "ready" in installed.log(), resident)
    found = (installed.folder.path / "socket").stat().st_mode, installed.folder.path.stat().st_mode
    assert [m & 0o777 for m in found] == [0o600, 0o700]
    (installed.folder.path / place).chmod(mode)
    done = installed.call("facts")
    assert json.loads(done.stdout)["warm"] is False
    assert "must belong to this user, with permissions" in done.stderr
    if place == ".":
        command = installed.folder.resident("--command", NAME, "--preload", "json")
        again = subprocess.run(command, env=installed.environment, capture_output=True, text=True)
        assert "must belong to this user, with permissions 700" in again.stderr


@pytest.fixture
def listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket in a folder that the shim takes for its own."""
    monkeypatch.setattr(shim, "FOLDER", str(tmp_path))
    monkeypatch.setattr(shim, "PATIENCE", 0.2)
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as found:
        found.bind("socket")
        (tmp_path / "socket").chmod(0o600)
        found.listen()
        yield found


def test_the_shim_refuses_a_resident_process_of_another_user(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim.connect().close()
    monkeypatch.setattr(shim, "private", lambda *_: None)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(shim.Cold, match="a process of another user"):
        shim.connect()


def test_the_resident_process_refuses_a_shim_of_another_user(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from equipoise.flower.warm.loaded_files import LoadedFiles
    from equipoise.flower.warm.resident import Resident

    with shim.connect() as connection:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        Resident(listening, lambda: None, LoadedFiles([]), {}).accept()
        assert connection.recv(100) == b""
    assert "refused a process of another user" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"equipoise-warm-0\n", "another version"),
        (b"", "another version, or has just ended"),
        (b"x" * 10000, "another version"),
        (b"cold because it is so\n", "because it is so"),
        (shim.PROTOCOL + b"\n", "ended before it started"),
        (shim.PROTOCOL + b"\nsignal 9\n", "ended before it started"),
        (shim.PROTOCOL + b"\ncold for this reason\n", "for this reason"),
        (None, "does not answer"),
    ],
)
def test_any_other_answer_means_cold(answer: bytes | None, reason: str, listening: socket.socket) -> None:
    connection = shim.connect()
    with connection, listening.accept()[0] as other:
        if answer is not None:
            other.sendall(answer)
            other.shutdown(socket.SHUT_WR)
        with pytest.raises(shim.Cold, match=reason):
            shim.hand_over(connection, sys.executable)


def test_a_damaged_request_does_not_end_the_resident_process(
    installed: Installed, resident: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "FOLDER", str(installed.folder.path))
    null = os.open(os.devnull, os.O_RDWR)
    for body in (b"", b"x", (10**12).to_bytes(8, "big"), b"\0" * 8, (3).to_bytes(8, "big") + b"a\0b", b"\xff" * 100):
        with shim.connect() as connection, suppress(OSError):
            assert shim.line(connection)[0] == shim.PROTOCOL
            socket.send_fds(connection, [body or b"\0"], [null] * 4)
    os.close(null)
    assert json.loads(installed.call("facts").stdout)["warm"] is True
    assert len(os.listdir(f"/proc/{resident.pid}/fd")) < 12  # what came with them is closed


def test_the_shim_needs_nothing_but_the_standard_library(installed: Installed) -> None:
    text = (installed.folder.bin / NAME).read_text()
    assert text.splitlines()[0] == f"#!{sys.executable} -IS"
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
    assert names == {"os", "signal", "socket", "sys"}
    assert not any(isinstance(n, ast.ImportFrom) for n in imports)


def test_an_interpreter_with_spaces_in_its_path_works(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    place = installed.root / "it's a folder"
    place.mkdir()
    (place / "python").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    WarmFolder(installed.folder.path, NAME).prepare()
    assert installed.call("exit", 4).returncode == 4
