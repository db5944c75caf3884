"""The socket of the resident process, in a folder that one such process at a time may serve."""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from equipoise.errors import EquipoiseError

_PATIENCE = 5.0  # seconds that an earlier process has to end: its children get three


class OwnSocket:
    """A listening socket in a folder that only this user may enter; it holds the folder's lock."""

    def __init__(self, folder: Path):
        """Lock the folder and open the socket.

        Args:
            folder: the folder.
        """
        self.folder = folder
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise EquipoiseError(f"{folder} must belong to this user, with permissions 700")
        self.lock = self._lock()
        self.socket = self._listen()
        self.inode = (folder / "socket").lstat().st_ino

    def _lock(self) -> int:
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(file)
                    raise EquipoiseError(
                        f"another resident process serves {self.folder}; end it first, or use another folder"
                    ) from None
                time.sleep(0.05)
            else:
                return file

    def _listen(self) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        number = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        before = os.umask(0o177)
        try:
            part = self.folder / "socket.part"
            part.unlink(missing_ok=True)
            bound.bind(f"/proc/self/fd/{number}/socket.part")  # because the path of a socket may have 107 bytes only
            bound.listen(128)
            part.replace(self.folder / "socket")  # whoever sees it can connect
        except OSError as error:
            raise EquipoiseError(f"cannot open a socket in {self.folder}: {error.strerror or error}") from None
        finally:
            os.umask(before)
            os.close(number)
        return bound

    def close_in_child(self) -> None:
        """Close what a forked child must not hold: the lock would outlive this process with it."""
        self.socket.close()
        os.close(self.lock)

    def remove(self) -> None:
        """Remove the socket's file, if it is still this one's."""
        with suppress(OSError):
            if (self.folder / "socket").lstat().st_ino == self.inode:
                (self.folder / "socket").unlink()
