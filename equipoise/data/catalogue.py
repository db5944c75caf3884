"""What data there are on this machine, and fetching those that are not."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from equipoise.data.download import fetch
from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from equipoise.settings import nearest

Meter = Callable[[str, int, int | None], None]
"""Told of a file how many bytes of how many have come."""


@dataclass(frozen=True)
class Entry:
    name: str
    state: str
    "complete, subset, damaged, missing, bundled or generated"
    detail: str
    where: str = ""


def entry(name: str, folder: Path) -> Entry:
    """The state of one data set, from the headers of its files."""
    source = SOURCES[name]()
    if source.draws:
        return Entry(name, "generated", "drawn from the seed, nothing to download")
    try:
        found = source.look(folder)
    except EquipoiseError as error:
        return Entry(name, "damaged", str(error))
    if found is not None:
        count = f"{found.have:,} {found.unit}" if found.complete else f"{found.have:,} of {found.of:,} {found.unit}"
        return Entry(name, "complete" if found.complete else "subset", count, str(found.where))
    get = f"equipoise data get {name}" + ("" if source.remotes else " says how to make it")
    if source.bundled:
        return Entry(name, "bundled", f"an excerpt comes with the package; for all of it: {get}")
    return Entry(name, "missing", get)


def entries(folder: Path) -> list[Entry]:
    return [entry(name, folder) for name in SOURCES]


def get(name: str, folder: Path, mirror: str | None, meter: Meter) -> Entry:
    """Fetch the publisher's files, and see that what came is all of it."""
    if name not in SOURCES:
        raise EquipoiseError(f"there is no data set {name!r}{nearest(name, SOURCES)}")
    source = SOURCES[name]
    if source.draws:
        raise EquipoiseError(f"{name} is drawn from the seed; there is nothing to fetch")
    if not source.remotes:
        raise EquipoiseError(f"{name} cannot simply be downloaded: {source.how_to_get}")
    for remote in source.remotes:
        target = folder / remote.name
        there = target.exists()
        fetch(remote, folder, mirror=mirror, progress=partial(meter, remote.name))
        # Without a checksum the counts must tell; what is short of them must not be taken for the data set.
        if remote.md5 is None and not there:
            state = entry(name, folder)
            if state.state != "complete":
                target.unlink()
                raise EquipoiseError(f"what came for {name} is not all of it ({state.detail}), and was removed again")
    state = entry(name, folder)
    if state.state == "damaged":
        raise EquipoiseError(state.detail)
    return state
