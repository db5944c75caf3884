"""Decides when the resident process starts again after a package was replaced.

An installation takes a while, and half of a package cannot be imported. So the process, which lets clients run cold
meanwhile, waits until the files have stayed as they are for some seconds, has another process try all imports, and
starts again only when that has worked.
"""

import subprocess
import time
from collections.abc import Callable, Sequence

from equipoise.flower.warm.loaded_files import LoadedFiles

TICK = 0.25  # seconds between two looks
_SETTLED = 2.0  # seconds in which no file has changed
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 300.0  # seconds after imports that failed


class Renewal:
    """One renewal, from the moment at which a file was found to be another."""

    def __init__(self, loaded: LoadedFiles, trial: Sequence[str], log: Callable[[str], None]):
        """Begin to wait.

        Args:
            loaded: the files as they were imported.
            trial: the command that tries all imports.
            log: gets a line if they fail.
        """
        self.loaded, self.trial, self.log = loaded, trial, log
        self.seen, self.since = loaded.now(), time.monotonic()
        self.next, self.pause = 0.0, _FIRST_PAUSE
        self.running: subprocess.Popen[bytes] | None = None

    def ready(self) -> bool:
        """Tell whether everything can be imported now; to be asked again and again."""
        now, facts = time.monotonic(), self.loaded.now()
        if facts != self.seen:
            self.seen, self.since, self.next, self.pause = facts, now, 0.0, _FIRST_PAUSE
            self.end()
        if now < max(self.since + _SETTLED, self.next):
            return False
        if self.running is None:
            try:
                self.running = subprocess.Popen(self.trial, stdin=subprocess.DEVNULL)
            except OSError as error:
                self._failed(str(error))
            return False
        code = self.running.poll()
        if code:
            self.running = None
            self._failed(f"exit code {code}")
        return code == 0

    def _failed(self, why: str) -> None:
        self.log(f"the replaced packages cannot be imported ({why}), so clients run cold; again in {self.pause:g} s")
        self.next = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, _LONGEST_PAUSE)

    def end(self) -> None:
        """End the process that tries the imports, if there is one."""
        if self.running is not None:
            self.running.kill()
            self.running.wait()
            self.running = None
