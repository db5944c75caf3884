"""The state of all data sets on this machine, and downloads of those that are missing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from equipoise.data.downloads import fetch
from equipoise.data.source import DataProgress, LoadRequest
from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from equipoise.registry import is_own_code
from equipoise.settings import nearest

Meter = Callable[[str, int, int | None], None]
"""Called with a file's name, the number of bytes received so far, and the total, or None if it is unknown."""


@dataclass(frozen=True)
class CatalogueEntry:
    """A data set and its state on this machine."""

    name: str
    state: str
    "complete, subset, present (the full size is unknown), damaged, missing, bundled, generated or own"
    detail: str
    where: str = ""


def entry(name: str, folder: Path) -> CatalogueEntry:
    """Return the state of one data set, judged by the headers of its files."""
    if is_own_code(name) or name not in SOURCES or SOURCES[name].own:
        return CatalogueEntry(name, "own", "your own data; nothing to download")
    source = SOURCES[name]()
    if source.draws:
        return CatalogueEntry(name, "generated", "drawn from the seed; nothing to download")
    try:
        found = source.look(folder)
    except EquipoiseError as error:
        return CatalogueEntry(name, "damaged", str(error))
    if found is not None:
        return CatalogueEntry(name, found.state, str(found), str(found.where))
    get = f"equipoise data get {name}" + ("" if source.remotes else " explains how to make it")
    if source.bundled:
        return CatalogueEntry(name, "bundled", f"an excerpt comes with the package; for the full data: {get}")
    return CatalogueEntry(name, "missing", get)


def entries(folder: Path) -> list[CatalogueEntry]:
    """Return the state of every data set."""
    return [entry(name, folder) for name in SOURCES]


def download(name: str, folder: Path, mirror: str | None, meter: Meter) -> None:
    """Download the publisher's files of a data set.

    Args:
        name: the name of the data set.
        folder: the data folder.
        mirror: address of a folder that is used in place of the publisher's; None for the publisher itself.
        meter: is called while bytes arrive.
    """
    if name not in SOURCES:
        raise EquipoiseError(f"there is no data set {name!r}{nearest(name, SOURCES)}")
    source = SOURCES[name]
    if source.draws or source.own:
        why = "stands for data of your own" if source.own else "is drawn from the seed"
        raise EquipoiseError(f"{name} {why}; there is nothing to download")
    if not source.remotes:
        raise EquipoiseError(f"{name} cannot be downloaded directly: {source.how_to_get}")

    def check(path: Path) -> None:
        """Count what a file without a published checksum holds; an incomplete one must not get its final name."""
        try:
            found = source().look_at(path)
        except EquipoiseError as error:
            raise EquipoiseError(f"the download of {name} is not the expected data and was deleted: {error}") from None
        if found.state != "complete":
            raise EquipoiseError(f"the download of {name} is incomplete ({found}) and was deleted")

    for remote in source.remotes:
        counted = check if remote.md5 is None else None
        fetch(remote, folder, mirror=mirror, progress=partial(meter, remote.name), check=counted)


def verify(name: str, folder: Path, progress: DataProgress) -> CatalogueEntry:
    """Read and check all files of a data set, and return its state.

    This finds damage in files that were there before, and fills the cache, so that the first run starts quickly.
    """
    source = SOURCES[name]
    try:
        source().verify(LoadRequest(folder, progress=progress))
    except EquipoiseError as error:
        raise EquipoiseError(f"the files of {name} are there, but cannot be used: {error}") from None
    state = entry(name, folder)
    targets = [folder / remote.name for remote in source.remotes]
    if Path(state.where) not in (*targets, *(target.parent for target in targets)):
        return replace(
            state, detail=f"{state.detail} (it is used in place of {targets[0].name}; remove it to use that)"
        )
    return state
