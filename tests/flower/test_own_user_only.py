"""Ports on loopback that answer to one user of the machine only."""

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from equipoise.flower import own_user_only
from equipoise.flower.credentials import write_certificates, write_key
from equipoise.flower.own_user_only import owner
from equipoise.flower.processes import Processes, free_ports, own_user_command
from tests.support.waiting import LIMIT, until

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.skipif(not own_user_only.supported(), reason="only Linux says to whom a connection belongs"),
]
SOMEBODY_ELSE = os.getuid() + 1

SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
import own_user_only
own_user_only.protect(int(sys.argv[2]))
import uvicorn

async def app(scope, receive, send):
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})

tls = {"ssl_certfile": sys.argv[4] + "/server.pem", "ssl_keyfile": sys.argv[4] + "/server.key"} if sys.argv[4:] else {}
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[3]), lifespan="off", **tls)
"""


def answer(port: int, tls: bool = False) -> bytes:
    """What a port answers to somebody without any credential; nothing if it closes the connection."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as plain:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(plain) if tls else plain as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
                return connection.recv(1000)
    except (ConnectionError, ssl.SSLEOFError):
        return b""


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection: the one that was accepted, and the other."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as there:
        here, _ = server.accept()
        with here:
            yield here, there


@pytest.fixture(params=[own_user_only._asked, own_user_only._read], ids=["asked", "read"])
def look(request: pytest.FixtureRequest) -> Callable[[Any, Any], int | None]:
    """Both ways to find the owner: the kernel is asked for one connection, or its tables are read."""
    if request.param is own_user_only._asked and not own_user_only._answers():
        pytest.skip("this kernel does not answer")
    return cast(Callable[[Any, Any], int | None], request.param)


V4, V6, MAPPED = (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::ffff:127.0.0.1")


@pytest.mark.parametrize(
    ("server", "client"),
    [(V4, V4), (V6, V6), (MAPPED, V4), (V4, MAPPED), (MAPPED, MAPPED)],
    ids=["v4", "v6", "mapped server", "mapped client", "mapped"],
)
def test_the_owner_of_a_connection_is_known(look: Any, server: Any, client: Any) -> None:
    with socket.socket(server[0]) as listening, socket.socket(client[0]) as there:
        try:
            listening.bind((server[1], 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listening.listen()
        there.connect((client[1], listening.getsockname()[1]))
        here, address = listening.accept()
        with here:
            assert look(here.getsockname()[:2], address[:2]) == os.getuid()
            assert owner(here.getsockname()[:2], address[:2]) == os.getuid()
            assert look(here.getsockname()[:2], (address[0], 1)) is None


@pytest.mark.skipif(not own_user_only._answers(), reason="this kernel does not answer")
def test_the_tables_are_not_read_if_the_kernel_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow with the connections of all users, so that anybody could keep a server busy."""
    monkeypatch.delattr(own_user_only, "_read")
    with connected() as (here, there):
        assert owner(here.getsockname(), here.getpeername()) == os.getuid()
        there.close()
        assert owner(here.getsockname(), ("127.0.0.1", 1)) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_the_owner_is_who_made_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = (
            "import os, socket; c = socket.socket(); os.setuid(65534); c = socket.socket();"
            f"c.connect(('127.0.0.1', {port})); os.read(0, 1)"
        )
        with subprocess.Popen([sys.executable, "-IS", "-c", script], stdin=subprocess.PIPE) as other:
            here, _ = server.accept()
            with here:
                assert owner(here.getsockname(), here.getpeername()) == 65534
            other.communicate(b"x")


def test_a_connection_that_the_other_end_has_left_belongs_to_nobody(look: Any) -> None:
    """Not to root, as whom the kernel would list it."""
    with connected() as (here, there):
        addresses = here.getsockname(), here.getpeername()
        there.close()
        assert look(*addresses) is None


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_other_users_get_no_answer(tls: bool, tmp_path: Path) -> None:
    write_certificates(tmp_path / "keys", ["127.0.0.1"])
    users = {"ours": os.getuid(), "theirs": SOMEBODY_ELSE}
    ports = dict(zip(users, free_ports(2), strict=True))
    with Processes(tmp_path, {}) as started:
        for name, user in users.items():
            folder = str(Path(own_user_only.__file__).parent)
            command = [sys.executable, "-c", SERVER, folder, str(user), str(ports[name])]
            started.start(name, [*command, *([str(tmp_path / "keys")] if tls else [])])
        for name, port in ports.items():
            started.await_port(name, port, seconds=LIMIT)
        assert answer(ports["ours"], tls).startswith(b"HTTP/1.1 200")
        for _ in range(20):
            assert answer(ports["theirs"], tls) == b""
        assert answer(ports["ours"], tls).startswith(b"HTTP/1.1 200")
        assert f"only user {SOMEBODY_ELSE} may connect" in (tmp_path / "theirs.log").read_text()
        assert "Traceback" not in (tmp_path / "theirs.log").read_text()
        for _ in range(20):
            assert answer(ports["theirs"], tls) == b""
        assert (tmp_path / "theirs.log").read_text().count("may connect") == 20, "nobody can fill the disk"


def test_a_port_that_could_not_be_guarded_is_not_opened(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import own_user_only; own_user_only.protect(0)\n"
        "import socket; socket.socketpair(); socket.create_server(('127.0.0.1', 0)); print('open')"
    )
    command = [sys.executable, "-c", script, str(Path(own_user_only.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode != 0
    assert "cannot be kept from other users" in done.stderr
    assert done.stdout == ""


def test_a_port_of_which_python_does_not_hear_ends_the_program(tmp_path: Path) -> None:
    """Such as one of gRPC."""
    (tmp_path / "mine.py").write_text(
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\nimport grpc\n"
        "server = grpc.server(ThreadPoolExecutor(1))\nserver.add_insecure_port('127.0.0.1:0')\nserver.start()\n"
        "print('open', flush=True)\ntime.sleep(1000)\n"
    )
    command = own_user_command([sys.executable, "-P", "-m", "mine"])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (1, "open\n")
    assert done.stderr.startswith("equipoise: a port of this program cannot be kept from other users")
    assert done.stderr.count("\n") == 1


def test_a_port_that_no_guarded_server_takes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = own_user_only.Ports()
    monkeypatch.setattr(own_user_only, "listening", lambda: {os.fstat(opened.fileno()).st_ino})
    with socket.socket() as opened:
        with pytest.raises(RuntimeError, match="cannot be kept from other users"):
            ports.on_event("socket.bind", (opened, None))
        ports.guarding = True
        assert ports.unguarded(), "nobody has heard of it"
        ports.on_event("socket.bind", (opened, None))
        assert not ports.unguarded(), "a server may be starting"
        monkeypatch.setattr(own_user_only, "_NEW", 0.0)
        assert ports.unguarded(), "none has started"
        ports.serve([opened])
        assert not ports.unguarded()


def test_own_ports_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as other:
        found = own_user_only.listening()
        assert os.fstat(server.fileno()).st_ino in found
        assert os.fstat(other.fileno()).st_ino not in found


@pytest.mark.parametrize("safe", [{}, {"PYTHONSAFEPATH": "1"}], ids=["", "PYTHONSAFEPATH"])
def test_the_programs_own_modules_are_found_and_those_beside_the_guard_are_not(
    safe: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("import importlib.util\nprint(importlib.util.find_spec('own_user_only'))")
    command = own_user_command([sys.executable, "-P", "-m", "mine"])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path), **safe}, capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.stdout, done.returncode) == ("None\n", 0), done.stderr


@pytest.mark.slow
def test_flowers_own_servers_answer_to_their_user_only(tmp_path: Path) -> None:
    """Those of a deployment, started for somebody else: they do not know us."""
    keys = tmp_path / "keys"
    write_certificates(keys, ["127.0.0.1"])
    write_key(keys / "node")
    link, node, open_link = free_ports(3)
    files = ["--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.pem"]
    files += ["--ssl-keyfile", keys / "server.key"]
    certificates = [str(word) for word in files]

    def superlink(port: int) -> list[str]:
        return ["flower-superlink", "--host", "127.0.0.1", "--port", str(port), *certificates, "--isolation", "process"]

    supernode = ["flower-supernode", "--superlink", f"127.0.0.1:{link}", "--root-certificates", str(keys / "ca.crt")]
    supernode += ["--host", "127.0.0.1", "--port", str(node), "--auth-supernode-private-key", str(keys / "node")]
    quiet = {"FLWR_HOME": str(tmp_path / "flwr"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    with Processes(tmp_path / "logs", quiet) as started:
        for name, command in (("link", superlink(link)), ("node", supernode)):
            started.start(name, [*own_user_command(["--user", str(SOMEBODY_ELSE)]), *command])
        started.start("open", superlink(open_link))
        for name, port in (("link", link), ("node", node), ("open", open_link)):
            started.await_port(name, port, seconds=LIMIT)
        until(lambda: answer(open_link, tls=True).startswith(b"HTTP/1.1 200"))  # Flower alone answers to everybody
        assert answer(link, tls=True) == b""
        assert answer(node) == b""
        for name in ("link", "node"):
            assert f"only user {SOMEBODY_ELSE} may connect" in (tmp_path / "logs" / f"{name}.log").read_text()
