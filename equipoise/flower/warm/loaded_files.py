"""Notices that an installed package was replaced after it was imported."""

import os
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

Facts = tuple[int, int, int]


def facts_of(path: str) -> Facts | None:
    """Return what changes when a file is replaced, or None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class LoadedFiles:
    """The files of all modules that are imported now, and the installed versions of some packages."""

    def __init__(self, packages: Iterable[str]):
        """Remember the files as they are.

        Args:
            packages: packages whose installed version is compared as well.
        """
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        paths = {path for path in files if isinstance(path, str)} | {str(p) for p in map(_metadata, packages) if p}
        self.facts = {path: facts_of(path) for path in paths}

    def now(self) -> dict[str, Facts | None]:
        """Return the same files as they are now."""
        return {path: facts_of(path) for path in self.facts}

    def changed(self) -> str | None:
        """Return a file that is not as it was when it was imported."""
        return next((path for path, facts in self.facts.items() if facts_of(path) != facts), None)


def _metadata(package: str) -> object:
    """Return the file that names the package's version; an upgrade replaces or removes it."""
    try:
        return distribution(package).locate_file(f"{package}-{distribution(package).version}.dist-info/METADATA")
    except PackageNotFoundError:
        return None
