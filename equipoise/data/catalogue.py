"""What data there are on this machine, and fetching those that are not."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from equipoise.data.downloads import fetch
from equipoise.data.source import DataProgress, LoadRequest
from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from equipoise.settings import nearest

Meter = Callable[[str, int, int | None], None]
"""Told of a file how many bytes of how many have come."""


@dataclass(frozen=True)
class CatalogueEntry:
    name: str
    state: str
    "complete, subset, present (nobody knows how much there should be), damaged, missing, bundled or generated"
    detail: str
    where: str = ""


def entry(name: str, folder: Path) -> CatalogueEntry:
    """The state of one data set, from the headers of its files."""
    source = SOURCES[name]()
    if source.draws:
        return CatalogueEntry(name, "generated", "drawn from the seed, nothing to download")
    try:
        found = source.look(folder)
    except EquipoiseError as error:
        return CatalogueEntry(name, "damaged", str(error))
    if found is not None:
        return CatalogueEntry(name, found.state, str(found), str(found.where))
    get = f"equipoise data get {name}" + ("" if source.remotes else " says how to make it")
    if source.bundled:
        return CatalogueEntry(name, "bundled", f"an excerpt comes with the package; for all of it: {get}")
    return CatalogueEntry(name, "missing", get)


def entries(folder: Path) -> list[CatalogueEntry]:
    return [entry(name, folder) for name in SOURCES]


def download(name: str, folder: Path, mirror: str | None, meter: Meter) -> None:
    """Fetch the publisher's files."""
    if name not in SOURCES:
        raise EquipoiseError(f"there is no data set {name!r}{nearest(name, SOURCES)}")
    source = SOURCES[name]
    if source.draws:
        raise EquipoiseError(f"{name} is drawn from the seed; there is nothing to fetch")
    if not source.remotes:
        raise EquipoiseError(f"{name} cannot simply be downloaded: {source.how_to_get}")

    def check(path: Path) -> None:
        """Where no checksum is published the counts must tell; what is short of them must not get the file's name."""
        try:
            found = source().look_at(path)
        except EquipoiseError as error:
            raise EquipoiseError(f"what came for {name} is something else and was not kept: {error}") from None
        if found.state != "complete":
            raise EquipoiseError(f"what came for {name} is not all of it ({found}) and was not kept")

    for remote in source.remotes:
        counted = check if remote.md5 is None else None
        fetch(remote, folder, mirror=mirror, progress=partial(meter, remote.name), check=counted)


def verify(name: str, folder: Path, progress: DataProgress) -> CatalogueEntry:
    """Read all of it: what was there before may be damaged, and the first run will be quick."""
    source = SOURCES[name]
    try:
        source().verify(LoadRequest(folder, progress=progress))
    except EquipoiseError as error:
        raise EquipoiseError(f"{name} is here, but cannot be used: {error}") from None
    state = entry(name, folder)
    targets = [folder / remote.name for remote in source.remotes]
    if Path(state.where) not in (*targets, *(target.parent for target in targets)):
        return replace(state, detail=f"{state.detail} (this is read before {targets[0].name}; remove it to use that)")
    return state
