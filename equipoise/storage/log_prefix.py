"""The beginning of a log as a checkpoint saw it: its length and the digest of its bytes."""

from hashlib import blake2b
from pathlib import Path

_BLOCK = 1 << 20


class LogPrefix:
    """A log as far as it has been read; only what was appended since is read again."""

    def __init__(self, path: Path):
        self.path = path
        self._start_over()

    def _start_over(self) -> None:
        self.length, self.hasher = 0, blake2b(digest_size=16)

    def read_on(self, end: int | None = None) -> str:
        """Read what follows, up to `end` or the end of the log; return the digest of everything read so far."""
        size = self.path.stat().st_size if self.path.exists() else 0
        end = size if end is None else min(end, size)
        if end < self.length:  # it was cut
            self._start_over()
        if end > self.length:
            with self.path.open("rb") as file:
                file.seek(self.length)
                while self.length < end and (block := file.read(min(_BLOCK, end - self.length))):
                    self.hasher.update(block)
                    self.length += len(block)
        return self.hasher.hexdigest()


def find_change(log: Path, length: int, digest: str | None) -> str | None:
    """Return how a log differs from what it began with at a checkpoint, in words; None if it does not.

    Args:
        log: the log.
        length: its length in bytes at the checkpoint.
        digest: the digest of these bytes; None if the checkpoint, of an older version, does not have it.
    """
    if length and not log.exists():
        return f"{log.name} is missing"
    prefix = LogPrefix(log)
    found = prefix.read_on(length)
    if prefix.length < length:
        return f"{log.name} is shorter than at that checkpoint"
    if digest is not None and found != digest:
        return f"{log.name} has other content than at that checkpoint"
    return None
