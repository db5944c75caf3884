"""What a data set by name is: settings that read it from its publisher's files, or draw it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from equipoise.data.downloads import Remote
from equipoise.data.federation import SPLIT
from equipoise.data.pool import Pool
from equipoise.errors import EquipoiseError
from equipoise.settings import Settings

DataProgress = Callable[[int, int], None]
"""Told how much of a long reading is done, of how much."""


@dataclass(frozen=True)
class LoadRequest:
    """What a source is asked for. Most need the folder alone."""

    folder: Path
    clients: int | None = None
    split: tuple[float, float, float] = SPLIT
    seed: int = 0
    progress: DataProgress = lambda done, total: None


@dataclass(frozen=True)
class DatasetStatus:
    """What of a data set is there, by its headers."""

    where: Path
    have: int | None
    "None where the headers do not tell"
    of: int | None
    "None where nobody has said how many there are"
    unit: str = "samples"

    @property
    def state(self) -> str:
        if self.have is None or self.of is None:
            return "present"
        return "complete" if self.have >= self.of else "subset"

    def __str__(self) -> str:
        if self.have is None:
            return f"how many {self.unit} there are will show when they are read"
        return f"{self.have:,} of {self.of:,} {self.unit}" if self.state == "subset" else f"{self.have:,} {self.unit}"


class Source(Settings, ABC):
    registry: ClassVar[Mapping[str, type["Source"]]] = {}
    """All data sets by name; filled in by the registry, which imports the sources."""
    remotes: ClassVar[tuple[Remote, ...]] = ()
    """The publisher's files, for `equipoise data get`."""
    how_to_get: ClassVar[str] = ""
    """What to do where no file can simply be downloaded."""
    draws: ClassVar[bool] = False
    """Does it draw its samples itself, with a validation and a test part of their own?"""
    bundled: ClassVar[bool] = False
    """Is there something to work with when nothing was downloaded?"""

    @abstractmethod
    def load(self, ask: LoadRequest) -> Pool:
        """All samples, pooled."""

    def verify(self, ask: LoadRequest) -> None:
        """Read and check all of the files, and keep what was decoded."""
        self.load(ask)

    def look(self, folder: Path) -> DatasetStatus | None:
        """What is there, without reading it all; None where nothing is."""
        return None

    def look_at(self, path: Path) -> DatasetStatus:
        """What is in this one file, checked for damage: for a file whose publisher gives no checksum."""
        raise TypeError(f"{type(self).__name__} has a file without a checksum, and no look_at to check it with")


class MissingFile(EquipoiseError):
    """A file is not there, which for some sources is no error."""


def missing(name: str, looked: list[Path], cls: type[Source]) -> MissingFile:
    """The sentence for a file that is not there."""
    places = " and ".join(str(folder) for folder in looked)
    source = next(n for n, c in Source.registry.items() if c is cls)
    get = f"`equipoise data get {source}` fetches it" if cls.remotes else cls.how_to_get
    return MissingFile(f"the file {name} was not found in {places}; {get}, and --data names the folder")


def portion(have: int, of: int, unit: str = "samples") -> str:
    """'20,000 of 60,000 samples', or nothing where it is all of them."""
    return "" if have >= of else f"{have:,} of {of:,} {unit}"
