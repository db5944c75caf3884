"""Runs a program of Flower's whose ports answer only to the user who started it.

    python -P own_user_only.py [--user UID] PROGRAM [ARGUMENT ...]
    python -P own_user_only.py [--user UID] -m MODULE [ARGUMENT ...]

Flower's SuperLink and SuperNodes listen on loopback without asking who calls: any user of the machine could register
clients, start runs (that is, run code as their owner), or fetch a client's messages. Linux knows to which user the
other end of a loopback connection belongs, so every connection is looked up and those of other users are closed before
a request of theirs is read. This holds for all that Flower serves with uvicorn; a port that it opened in any other way
would not be protected, so the program is stopped then.

It is run by its path and imports nothing of Equipoise, because importing PyTorch takes seconds; with -P, so that the
modules beside this file are not imported by their bare names.
"""

import os
import runpy
import socket
import struct
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

_TABLE = Path("/proc/net/tcp")
_ESTABLISHED = "01"  # in any other state the table may show user 0 for a connection that nobody holds any more
_TRIES = 10  # a row that moves while the table is read may be missed


def supported() -> bool:
    """Tell whether this machine can say to whom a connection belongs."""
    return sys.platform == "linux" and os.access(_TABLE, os.R_OK)


def _row(address: tuple[str, int]) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"


def owner(here: tuple[str, int], there: tuple[str, int]) -> int | None:
    """Return the user to whom the other end of a loopback connection belongs, or None if that cannot be said.

    Args:
        here: address and port of this end.
        there: address and port of the other end.
    """
    wanted = [_row(there), _row(here), _ESTABLISHED]
    for _ in range(_TRIES):
        for line in _TABLE.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1:4] == wanted:
                return int(fields[7])
        time.sleep(0.001)
    return None


def guarded(protocol: type[Any], user: int) -> type[Any]:
    """Return a protocol like the given one that closes the connections of other users at once."""

    class Guarded(protocol):
        refused = False

        def connection_made(self, transport: Any) -> None:
            here, there = (transport.get_extra_info(name)[:2] for name in ("sockname", "peername"))
            try:
                known = owner(here, there)
            except OSError:
                known = None
            if known == user:
                super().connection_made(transport)
                return
            self.refused = True
            print(f"closed a connection of user {known}: only user {user} may connect", flush=True)
            transport.abort()

        def data_received(self, data: bytes) -> None:
            if not self.refused:
                super().data_received(data)

        def eof_received(self) -> Any:
            return None if self.refused else super().eof_received()

        def connection_lost(self, error: Exception | None) -> None:
            if not self.refused:
                super().connection_lost(error)

    return Guarded


def protect(user: int) -> None:
    """Make every server of uvicorn in this process answer to one user only, and allow no other ports."""
    import uvicorn

    load, servers = uvicorn.Config.load, []

    def load_guarded(config: uvicorn.Config) -> None:
        load(config)
        config.http_protocol_class = guarded(config.http_protocol_class, user)
        servers.append(config)

    setattr(uvicorn.Config, "load", load_guarded)  # noqa: B010 (mypy forbids the assignment)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "socket.bind" or servers:
            return
        if arguments[0].type == socket.SOCK_STREAM and arguments[0].family in (socket.AF_INET, socket.AF_INET6):
            raise RuntimeError("this version of Flower opens a port that cannot be kept from other users")

    sys.addaudithook(watch)


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
