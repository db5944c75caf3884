"""The resident process of warm clients: it imports everything once, and forks for every message.

    python -P -m equipoise.flower.warm.resident FOLDER

It has one thread, has not initialised CUDA, and never runs code of an app: apps are imported by its children only. It
ends with the process that started it.
"""

import argparse
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NoReturn

from equipoise.errors import EquipoiseError
from equipoise.flower.warm import child
from equipoise.flower.warm.child import Request, send
from equipoise.flower.warm.loaded_files import LoadedFiles, facts_of
from equipoise.flower.warm.own_socket import OwnSocket
from equipoise.flower.warm.renewal import TICK, Renewal
from equipoise.flower.warm.shim import PROTOCOL

COMMAND = "flwr-clientapp"
TRIAL = "--trial"
PRELOADED = ("torch", "equipoise.flower.apps")
_DIES_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG
_PATIENCE = 5.0  # seconds that a shim has to send its request
_GRACE = 3.0  # seconds that children have to end after SIGTERM
_HANDLED = (signal.SIGTERM, signal.SIGINT)
_LARGEST = 8 << 20  # bytes of a request; Linux allows arguments and environment of 6 MB
# Variables that libraries read when they are loaded: the child cannot change them any more.
_READ_ONCE = (
    *("PYTHON", "LD_", "LANG", "LC_", "TZ", "MALLOC_", "GLIBC_", "FLWR_", "GRPC_", "EQUIPOISE_"),
    *(
        "OMP_",
        "GOMP_",
        "KMP_",
        "MKL_",
        "OPENBLAS_",
        "BLIS_",
        "NUMEXPR_",
        "ATEN_",
        "TORCH",
        "PYTORCH",
        "CUDA",
        "NVIDIA_",
    ),
)


def log(text: str) -> None:
    """Write one line to the log."""
    print(f"equipoise: resident process {os.getpid()}: {text}", file=sys.stderr, flush=True)


def threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def load(command: str, preloaded: Sequence[str]) -> Callable[[], Any]:
    """Import everything that children need; return the entry point of the program.

    Args:
        command: name of the program, as its package declares it.
        preloaded: further modules to import.
    """
    found: list[EntryPoint] = list(entry_points(group="console_scripts", name=command))
    if not found:
        raise EquipoiseError(f"no installed package declares the program {command}")
    for name in preloaded:
        importlib.import_module(name)
    main: Callable[[], Any] = found[0].load()
    # Libraries such as OpenBLAS start threads when they are loaded, end them before a fork, and start them again when
    # they need them. So after this fork there is one thread, unless somebody else has started another.
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    if (count := threads()) != 1:
        raise EquipoiseError(f"it has {count} threads after the imports, so it cannot fork safely")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise EquipoiseError("the imports have initialised CUDA, which does not survive a fork")
    gc.collect()
    gc.freeze()  # otherwise the first collection in a child copies all pages
    return main


def _installed(program: str) -> set[str]:
    """Return modification time, size and inode of the programs of this name that belong to this interpreter."""
    folders = {str(Path(sys.executable).parent), sysconfig.get_path("scripts")}
    folders.add(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")))
    found = (facts_of(f"{folder}/{program}") for folder in folders)
    return {" ".join(map(str, facts)) for facts in found if facts is not None}


class Resident:
    """Accepts requests of shims and forks a child for each."""

    def __init__(
        self,
        listening: socket.socket,
        main: Callable[[], Any],
        loaded: LoadedFiles,
        started: dict[str, str],
        close_in_child: Callable[[], None] = lambda: None,
    ):
        """Create the server.

        Args:
            listening: the socket.
            main: the entry point of the program.
            loaded: the files of everything that is imported.
            started: the environment with which this process was started.
            close_in_child: closes what children must not hold.
        """
        self.listening, self.main, self.loaded, self.started = listening, main, loaded, started
        self.children: dict[int, tuple[int, socket.socket]] = {}
        "by the descriptor that tells of its end: process number, and connection to its shim"
        self.close_in_child = close_in_child
        self.stale = ""
        self.renewal: Renewal | None = None
        self.selector = selectors.DefaultSelector()
        self.selector.register(listening, selectors.EVENT_READ, self.accept)

    def serve(self) -> None:
        """Serve until a package was replaced, no child is at work any more, and everything can be imported again."""
        while not (self.renewal and not self.children and self.renewal.ready()):
            ready = self.selector.select(TICK if self.renewal else None)
            for key, _ in ready[:1]:  # one at a time, because it may end another that is ready
                key.data()

    def accept(self) -> None:
        """Answer one shim."""
        try:
            connection, _ = self.listening.accept()
        except OSError as error:  # such as too many open files; children that end close theirs
            log(f"a shim could not be answered: {error}")
            time.sleep(0.1)
            return
        connection.settimeout(_PATIENCE)
        try:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if int.from_bytes(credentials[4:8], sys.byteorder) != os.getuid():
                log("refused a process of another user")
            elif changed := self._stale():
                send(connection, f"cold {changed}")
            else:
                connection.sendall(PROTOCOL + b"\n")
                if (request := self._request(connection)) is not None:
                    self._start(connection, request)
                    return
        except (OSError, ValueError, IndexError) as error:
            log(f"a request was not served: {error}")
            send(connection, f"cold {error}")
        connection.close()

    def _stale(self) -> str:
        if not self.stale and (path := self.loaded.changed()):
            self.stale = f"{path} has changed since the resident process started"
            self.renewal = Renewal(self.loaded, [*sys.orig_argv, TRIAL], log)
            log(f"{self.stale}; it starts again when everything can be imported")
        return self.stale

    def _request(self, connection: socket.socket) -> Request | None:
        """Return the request, or None if there is a reason for a cold start, which the shim is told."""
        header, files, _, _ = socket.recv_fds(connection, 8, 4)
        request = None
        try:
            if header:  # otherwise the shim has given up
                request = Request.parse(self._body(connection, header), files)
                if reason := self._unlike(request):
                    send(connection, f"cold {reason}")
                    request = None
        finally:
            if request is None:
                self._close(files)
        return request

    @staticmethod
    def _body(connection: socket.socket, header: bytes) -> bytes:
        left, pieces = int.from_bytes(header, "big"), []
        if len(header) != 8 or not 0 < left <= _LARGEST:
            raise ValueError("a request of impossible size")
        while left:
            piece = connection.recv(min(left, 1 << 16))
            if not piece:
                raise ValueError("a request is incomplete")
            left -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def _unlike(self, request: Request) -> str:
        """Return what differs between this process and the one that the real program would be."""
        if request.facts not in _installed(Path(request.program).name):
            return f"{request.program} does not belong to the resident process's {sys.executable}"
        given = {os.fsdecode(k): os.fsdecode(v) for k, v in request.environment.items()}
        for name in sorted(given.keys() | self.started.keys()):
            fixed = name.startswith(_READ_ONCE)
            if fixed and given.get(name) not in (self.started.get(name), os.environ.get(name)):
                return f"the resident process was started with another value of {name}"
        return ""

    @staticmethod
    def _close(files: Sequence[int]) -> None:
        for number in files:
            os.close(number)

    def _start(self, connection: socket.socket, request: Request) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # Signals wait: one before the child's own handlers would be handled in the child as if it were this process;
        # one before the child is registered would leave it behind.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            pid = os.fork()
            if not pid:
                self._become_child(connection, request)
            self._register(pid, connection)
        finally:
            self._close(request.files)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)

    def _become_child(self, connection: socket.socket, request: Request) -> NoReturn:
        try:
            self.selector.close()
            self.close_in_child()
            for number, (_, other) in self.children.items():
                os.close(number)
                other.close()
        except BaseException:
            os._exit(1)
        child.run(connection, request, self.main)

    def _register(self, pid: int, connection: socket.socket) -> None:
        ended = -1
        try:
            ended = os.pidfd_open(pid)
            self.selector.register(ended, selectors.EVENT_READ, lambda: self._ended(ended))
            self.selector.register(connection, selectors.EVENT_READ, lambda: self._abandoned(ended))
        except OSError:  # the real program runs instead, so the child must be gone before
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if ended >= 0:
                with suppress(KeyError):
                    self.selector.unregister(ended)
                os.close(ended)
            raise
        self.children[ended] = pid, connection

    def _abandoned(self, ended: int) -> None:
        """End a child whose shim is gone, as killing the shim would end the program that it stands for."""
        pid, connection = self.children[ended]
        self.selector.unregister(connection)
        os.kill(pid, signal.SIGKILL)  # it has not been waited for yet, so the number is still its own

    def _ended(self, ended: int) -> None:
        self.selector.unregister(ended)
        pid, connection = self.children.pop(ended)
        if connection in self.selector.get_map():
            self.selector.unregister(connection)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        number = os.waitstatus_to_exitcode(status)
        connection.settimeout(_PATIENCE)
        send(connection, f"exit {number}" if number >= 0 else f"signal {-number}")
        connection.close()

    def end(self) -> None:
        """End all children."""
        if self.renewal:
            self.renewal.end()
        pids = [pid for pid, _ in self.children.values()]
        until = time.monotonic() + _GRACE
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        while pids and time.monotonic() < until:
            pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            time.sleep(0.02)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _stop(number: int, frame: object) -> NoReturn:
    for each in _HANDLED:  # a second one must not break off the end
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    """Run the resident process."""
    parser = argparse.ArgumentParser(description="Resident process of warm clients.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, help="number of the process that started this one")
    parser.add_argument("--command", default=COMMAND)
    parser.add_argument("--preload", action="append", help="module to import before it forks")
    parser.add_argument(TRIAL, action="store_true", help="import everything, and end")
    options = parser.parse_args()
    started = dict(os.environ)
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)
    if (
        options.parent is not None and not options.trial and os.getppid() != options.parent
    ):  # it ended before the line above
        raise SystemExit("equipoise: the process that started the resident process has ended")
    preloaded = options.preload or PRELOADED
    if options.trial:
        _sentence(lambda: load(options.command, preloaded))
        return
    for number in _HANDLED:
        signal.signal(number, _stop)
    own = _sentence(lambda: OwnSocket(options.folder))  # before the imports, so that shims wait for them
    resident, code = None, 0
    try:
        entry = _sentence(lambda: load(options.command, preloaded))
        loaded = LoadedFiles({"flwr", *(name.partition(".")[0] for name in preloaded)})
        resident = Resident(own.socket, entry, loaded, started, own.close_in_child)
        log(f"ready, {len(sys.modules)} modules are imported")
        resident.serve()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    own.remove()
    if resident is not None:
        resident.end()
    if not code:
        _start_again()
    os._exit(code)


def _sentence(step: Callable[[], Any]) -> Any:
    """Do something whose failure is told in a sentence; a package that is being replaced may raise anything."""
    try:
        return step()
    except Exception as error:
        kind = "" if isinstance(error, EquipoiseError) else f"{type(error).__name__}: "
        raise SystemExit(f"equipoise: no resident process, so clients run cold: {kind}{error}") from None


def _start_again() -> NoReturn:
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    while True:
        try:
            os.execv(sys.executable, sys.orig_argv)
        except OSError as error:
            log(f"cannot start again: {error}")
            time.sleep(5)


if __name__ == "__main__":
    main()
