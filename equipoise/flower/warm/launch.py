"""Sets warm clients up: the folder with the shim, the resident process, and the environment of the SuperNodes."""

import os
import stat
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

from equipoise.errors import EquipoiseError
from equipoise.flower import keeper
from equipoise.flower.processes import Processes
from equipoise.flower.warm import shim
from equipoise.storage import atomic_files

NO_WARM = "warm clients need Linux 5.3 or later"
NAME = "warm-clients"
"""Name of the resident process, as messages and logs call it."""
_LONGEST_FIRST_LINE = 120  # older kernels cut the line that names the interpreter


def available() -> bool:
    """Tell whether this system can run warm clients."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def supernode_command(fast_poll: bool) -> list[str]:
    """Return the program that runs a SuperNode.

    Args:
        fast_poll: whether it looks for messages more often than Flower's own.
    """
    return [sys.executable, "-P", "-m", "equipoise.flower.warm.fast_poll"] if fast_poll else ["flower-supernode"]


class WarmFolder:
    """The folder of warm clients: `bin` with the shim, the socket, and notes on clients that ran cold."""

    def __init__(self, path: Path, command: str = "flwr-clientapp"):
        """Refer to a folder; `prepare` writes it.

        Args:
            path: the folder.
            command: the program that is replaced.
        """
        self.path, self.command, self._told = path.absolute(), command, False

    @property
    def bin(self) -> Path:
        """Return the folder that comes first on the PATH of SuperNodes."""
        return self.path / "bin"

    def prepare(self) -> None:
        """Write the shim into a folder that only this user may enter; notes of an earlier start are removed."""
        if not available():
            raise EquipoiseError(f"{NO_WARM}; leave --warm out")
        try:
            for folder in (self.path, self.bin):
                folder.mkdir(parents=True, exist_ok=True)
                found = folder.lstat()
                if not stat.S_ISDIR(found.st_mode):
                    raise EquipoiseError(f"{folder} must be a folder, not a link to one; remove the link")
                if found.st_uid != os.getuid():
                    raise EquipoiseError(f"{folder} belongs to another user; choose a folder of your own")
                folder.chmod(0o700)
            (self.path / shim.NOTES).unlink(missing_ok=True)
        except OSError as error:
            raise EquipoiseError(
                f"warm clients need to write into the folder {self.path}: {error.strerror}; clients run cold without"
            ) from None
        with atomic_files.atomic_write(self.bin / self.command) as temporary:
            temporary.touch(mode=0o700)
            temporary.chmod(0o700)
            temporary.write_text(self._shim(), encoding="utf-8")

    def _shim(self) -> str:
        text = Path(shim.__file__).read_text(encoding="utf-8")
        text = text.replace('FOLDER = ""', f"FOLDER = {str(self.path)!r}", 1)
        text = text.replace('COMMAND = ""', f"COMMAND = {self.command!r}", 1)
        first = f"#!{sys.executable} -IS"
        if len(first) > _LONGEST_FIRST_LINE or " " in sys.executable:
            # A line for sh that Python reads as a string, as pip writes it.
            quoted = sys.executable.replace("'", "'\"'\"'")
            first = f"#!/bin/sh\n'''exec' '{quoted}' -IS \"$0\" \"$@\"\n' '''"
        return f"{first}\n{text}"

    def put_on_path(self, environment: MutableMapping[str, str]) -> None:
        """Make SuperNodes with this environment find the shim first."""
        environment["PATH"] = os.pathsep.join([str(self.bin), environment.get("PATH", os.defpath)])

    def resident(self, *more: str) -> list[str]:
        """Return the command that runs the resident process."""
        return [sys.executable, "-P", "-m", "equipoise.flower.warm.resident", str(self.path), *more]

    def start(self, processes: Processes) -> None:
        """Start the resident process among those of a local deployment, whose SuperNodes use it from now on."""
        self.prepare()
        self.put_on_path(processes.environment)
        processes.start(NAME, self.resident())

    def cold_reason(self) -> str:
        """Return why a client ran cold, once; nothing if none did or it has been told."""
        try:
            lines = [] if self._told else (self.path / shim.NOTES).read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        self._told = self._told or bool(lines)
        return lines[0] if lines else ""


def become_supernode(folder: WarmFolder | None, command: list[str]) -> None:
    """Start the resident process, and let this process become the owner of the SuperNode, with which all of it ends.

    When a SuperNode dies, the program that it has started to ask for messages would go on asking, and obey whoever
    opens its port next; so the SuperNode runs below a keeper.

    Args:
        folder: the folder of the warm clients; None: without a resident process.
        command: the command of the SuperNode.
    """
    # Flower's programs start each other by name.
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    environment = {**os.environ, "PATH": os.pathsep.join(path)}
    environment.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")  # seconds; Flower's default is 1
    if folder is not None:
        folder.prepare()
        folder.put_on_path(environment)
        subprocess.Popen(
            folder.resident("--parent", str(os.getpid())),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the SuperNode only, which ends its clients in order
        )
    sys.stdout.flush()
    try:
        os.execve(sys.executable, [sys.executable, "-IS", keeper.__file__, "-", *command], environment)
    except OSError as error:
        raise EquipoiseError(f"cannot start {sys.executable}: {error.strerror}") from None
