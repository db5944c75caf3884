"""Runs a program of Flower's whose ports answer only to the user who started it.

    python -P own_user_only.py [--user UID] PROGRAM [ARGUMENT ...]
    python -P own_user_only.py [--user UID] -m MODULE [ARGUMENT ...]

Flower's SuperLink and SuperNodes listen on loopback without asking who calls: any user of the machine could register
clients, start runs (that is, run code as their owner), or fetch a client's messages. Linux knows to which user the
other end of a loopback connection belongs, so every connection is looked up and those of other users are closed before
a request of theirs is read. This holds for all that Flower serves with uvicorn. A port that it opens in any other way
is not protected, so the program is stopped then: at once if Python code opens it before uvicorn starts, and otherwise,
as with gRPC, whose ports Python does not hear of, when a look at the process's sockets, once a second at first and then
every half minute, has found it.

It is run by its path and imports nothing of Equipoise, because importing PyTorch takes seconds; with -P, so that the
modules beside this file are not imported by their bare names.
"""

import os
import runpy
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from ipaddress import ip_address
from itertools import chain, repeat
from pathlib import Path
from typing import Any

_TABLES = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}
_ESTABLISHED, _LISTENING = (
    1,
    10,
)  # in other states the kernel may name user 0 for a connection that nobody holds any more
_TRIES = 10  # a row that moves while a table is read may be missed
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST = 4, 20, 1
_HEADER, _QUESTION, _ADDRESSES = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("!HH16s16s")
_USER = 64  # offset of the user in an answer
_NEW = 60.0  # seconds in which a server of uvicorn has started with a port that it has bound
_LISTED = 20  # refused connections that are printed

_UNGUARDED = (
    "a port of this program cannot be kept from other users (gRPC's --health-server-address, or one of a version of "
    "Flower that is not known), so it ends"
)
Address = tuple[str, int]


def supported() -> bool:
    """Tell whether this machine can say to whom a connection belongs."""
    return sys.platform == "linux" and os.access(_TABLES[4], os.R_OK)


def _parsed(address: Address) -> tuple[int, bytes, int]:
    """Return version, bytes and port of an address; one of IPv4 that IPv6 has wrapped is one of IPv4."""
    host = ip_address(address[0].partition("%")[0])
    host = getattr(host, "ipv4_mapped", None) or host
    return host.version, host.packed, address[1]


def _asked(here: Address, there: Address) -> int | None:
    """Ask the kernel for one socket (inet_diag), which takes the same time however many there are."""
    (version, far, far_port), (_, near, near_port) = _parsed(there), _parsed(here)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    body = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    body += (
        _ADDRESSES.pack(far_port, near_port, far, near) + struct.pack("=I", 0) + b"\xff" * 8
    )  # any device and cookie
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + body)
        answer = kernel.recv(4096)
    found = answer[_HEADER.size :]
    # Without such a connection the answer is an error, or a socket that listens on the same port.
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY or len(found) < _USER + 4 or found[1] != _ESTABLISHED:
        return None
    return int.from_bytes(found[_USER : _USER + 4], sys.byteorder)


def _row(address: Address, version: int) -> str:
    _, packed, port = _parsed(address)
    if version == 6 and len(packed) == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _read(here: Address, there: Address) -> int | None:
    """Look a connection up in the kernel's tables."""
    for _ in range(_TRIES):
        for version, table in _TABLES.items():
            if version == 4 and _parsed(there)[0] == 6:
                continue
            wanted = [_row(there, version), _row(here, version), f"{_ESTABLISHED:02X}"]
            for line in _lines(table):
                if line[1:4] == wanted:
                    return int(line[7])
        time.sleep(0.001)
    return None


def _lines(table: Path) -> list[list[str]]:
    return [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []


@cache
def _answers() -> bool:
    """Tell whether the kernel answers questions for one socket: it says the same if there is none and if it cannot."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            here, there = server.accept()
            with here:
                return _asked(here.getsockname(), there) == os.getuid()
    except OSError:
        return False


def owner(here: Address, there: Address) -> int | None:
    """Return the user to whom the other end of a loopback connection belongs, or None if that cannot be said.

    Args:
        here: address and port of this end.
        there: address and port of the other end.
    """
    return (_asked if _answers() else _read)(here, there)


def guarded(protocol: type[Any], user: int) -> type[Any]:
    """Return a protocol like the given one that closes the connections of other users at once."""

    refusals = 0

    class Guarded(protocol):
        refused = False

        def connection_made(self, transport: Any) -> None:
            here, there = (transport.get_extra_info(name)[:2] for name in ("sockname", "peername"))
            try:
                known = owner(here, there)
            except (OSError, ValueError):
                known = None
            if known == user:
                super().connection_made(transport)
                return
            self.refused = True
            transport.abort()
            nonlocal refusals
            refusals += 1
            if refusals <= _LISTED:  # nobody shall fill the disk with them
                further = "; further ones are not listed" if refusals == _LISTED else ""
                print(f"closed a connection of user {known}: only user {user} may connect{further}", flush=True)

        def data_received(self, data: bytes) -> None:
            if not self.refused:
                super().data_received(data)

        def eof_received(self) -> Any:
            return None if self.refused else super().eof_received()

        def connection_lost(self, error: Exception | None) -> None:
            if not self.refused:
                super().connection_lost(error)

    return Guarded


def listening() -> set[int]:
    """Return the inodes of all TCP sockets of this process that listen."""
    found = {int(line[9]) for table in _TABLES.values() for line in _lines(table) if line[3] == f"{_LISTENING:02X}"}
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{number}"))
    return {inode for inode in found if f"socket:[{inode}]" in own}


class Ports:
    """The ports of this process: those that uvicorn serves with a guard, and no others."""

    def __init__(self) -> None:
        self.guarding = False
        "whether a server with a guard is being started"
        self.bound: dict[int, float] = {}
        self.served: set[int] = set()

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Refuse a port that Python code opens before there is a guard; remember those that it opens later."""
        if event != "socket.bind":
            return
        opened = arguments[0]
        if opened.type == socket.SOCK_STREAM and opened.family in (socket.AF_INET, socket.AF_INET6):
            if not self.guarding:
                raise RuntimeError(_UNGUARDED)
            self.bound[os.fstat(opened.fileno()).st_ino] = time.monotonic()

    def serve(self, sockets: Iterable[socket.socket]) -> None:
        """Remember the sockets of a server that has started with a guard."""
        self.served |= {os.fstat(each.fileno()).st_ino for each in sockets}

    def unguarded(self) -> bool:
        """Tell whether a socket listens that no guarded server has, nor is about to have."""
        now = time.monotonic()
        return any(now - self.bound.get(inode, -_NEW) >= _NEW for inode in listening() - self.served)

    def watch(self) -> None:
        """Look again and again, because code in C, such as gRPC's, opens ports without telling Python."""
        for pause in chain([1.0] * 30, repeat(30.0)):
            time.sleep(pause)
            with suppress(OSError):
                if self.unguarded():
                    os.write(2, f"equipoise: {_UNGUARDED}\n".encode())
                    os._exit(1)


def protect(user: int) -> None:
    """Make every server of uvicorn in this process answer to one user only, and allow no other ports."""
    import uvicorn

    _answers()  # which opens a port for a moment
    ports, load, startup = Ports(), uvicorn.Config.load, uvicorn.Server.startup

    def load_guarded(config: uvicorn.Config) -> None:
        load(config)
        config.http_protocol_class = guarded(config.http_protocol_class, user)
        ports.guarding = True

    async def startup_guarded(server: uvicorn.Server, *given: Any, **named: Any) -> None:
        await startup(server, *given, **named)
        ports.serve(each for one in getattr(server, "servers", ()) for each in one.sockets)

    setattr(uvicorn.Config, "load", load_guarded)  # noqa: B010 (mypy forbids the assignment)
    setattr(uvicorn.Server, "startup", startup_guarded)  # noqa: B010
    sys.addaudithook(ports.on_event)
    threading.Thread(target=ports.watch, daemon=True).start()


def main(arguments: list[str]) -> None:
    """Run a console program of an installed package, or a module.

    Args:
        arguments: its name and arguments, perhaps after `--user UID`.
    """
    user = os.getuid()
    if arguments[0] == "--user":
        user, arguments = int(arguments[1]), arguments[2:]
    protect(user)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    (program,) = entry_points(group="console_scripts", name=arguments[0])
    sys.argv = arguments
    program.load()()


if __name__ == "__main__":
    main(sys.argv[1:])
