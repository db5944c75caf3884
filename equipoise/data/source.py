"""The contract of a data set: settings that load it from its publisher's files, or draw it from the seed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from equipoise.data.downloads import Remote
from equipoise.data.federation import SPLIT
from equipoise.data.pool import Pool
from equipoise.data.series_facts import SeriesFacts
from equipoise.errors import EquipoiseError
from equipoise.settings import Settings

DataProgress = Callable[[int, int], None]
"""Called with how much of a long read is done, and how much there is in total."""


@dataclass(frozen=True)
class LoadRequest:
    """What a source needs to load its data; most use the folder only."""

    folder: Path
    clients: int | None = None
    split: tuple[float, float, float] = SPLIT
    seed: int = 0
    progress: DataProgress = lambda done, total: None
    folders: tuple[Path, ...] = ()
    "folders in which relative paths of settings begin, before the current one and the data folder"


@dataclass(frozen=True)
class DatasetStatus:
    """How much of a data set is there, judged by the headers of its files."""

    where: Path
    "file or folder that holds it"
    have: int | None
    "number that is there; None where the headers do not tell"
    of: int | None
    "number in the complete data set; None where it is unknown"
    unit: str = "samples"

    @property
    def state(self) -> str:
        """Return "complete", "subset", or "present" if the numbers are unknown."""
        if self.have is None or self.of is None:
            return "present"
        return "complete" if self.have >= self.of else "subset"

    def __str__(self) -> str:
        if self.have is None:
            return f"the number of {self.unit} is unknown until they are read"
        return f"{self.have:,} of {self.of:,} {self.unit}" if self.state == "subset" else f"{self.have:,} {self.unit}"


class Source(Settings, ABC):
    """A data set with its settings."""

    registry: ClassVar[Mapping[str, type["Source"]]] = {}
    """All data sets by name; set by the registry, which imports the sources."""
    remotes: ClassVar[tuple[Remote, ...]] = ()
    """The publisher's files, which `equipoise data get` downloads."""
    how_to_get: ClassVar[str] = ""
    """How to obtain the data where no file can be downloaded directly."""
    chronological: ClassVar[bool] = False
    """Whether each client's samples are in the order of time, and so are its training, validation and test samples."""
    draws: ClassVar[bool] = False
    """Whether the samples are drawn from the seed, including those for validation and test."""
    bundled: ClassVar[bool] = False
    """Whether an excerpt comes with the package, so that nothing has to be downloaded."""
    own: ClassVar[bool] = False
    """Whether the data are the user's own, so that there is nothing to download."""

    @abstractmethod
    def load(self, ask: LoadRequest) -> Pool:
        """Load all samples."""

    def load_client(self, path: Path, name: str, ask: LoadRequest) -> Pool | None:
        """Return the samples in a client's own file, which in a deployment is all that a client has.

        Args:
            path: the file.
            name: the client's name.
            ask: the request of the run.

        Returns:
            The samples of one owner of this name; None if the data set has no files of single clients, or this is none.
        """
        return None

    @property
    def shared_inputs(self) -> tuple[int, ...]:
        """Return the inputs whose coefficients are in truth the same for all clients; none where that is not known."""
        return ()

    def title(self, name: str) -> str:
        """Return the title of the data in tables; `name` is the name of the data set."""
        return name

    def next_input(self, series: SeriesFacts, owner: int, place: int) -> np.ndarray:
        """Return the input from which the values at a place in an owner's series, and after it, are forecast.

        Args:
            series: the series, as `load` returned them.
            owner: the owner, as an index in `series.names`.
            place: index in `series.values` of the first value to forecast; it may be one beyond the owner's last.
        """
        raise EquipoiseError(
            f"{type(self).__name__} does not make inputs from the end of its data, so nothing after it can be forecast"
        )

    def verify(self, ask: LoadRequest) -> None:
        """Read and check all files, and cache what was decoded."""
        self.load(ask)

    def look(self, folder: Path) -> DatasetStatus | None:
        """Return what is in the data folder, without reading it all; None if there is nothing."""
        return None

    def look_at(self, path: Path) -> DatasetStatus:
        """Check one file for damage and return what is in it; needed where the publisher gives no checksum."""
        raise TypeError(f"{type(self).__name__} has a file without a checksum, so it needs a method look_at")


class MissingFile(EquipoiseError):
    """A file does not exist, which some sources do not treat as an error."""


def missing_file(name: str, looked: list[Path], cls: type[Source]) -> MissingFile:
    """Return the error for a file that does not exist.

    Args:
        name: the name of the file.
        looked: the folders that were searched.
        cls: the source that needs the file.
    """
    places = " and ".join(str(folder) for folder in looked)
    source = next((n for n, c in Source.registry.items() if c is cls), cls.__name__)
    get = f"`equipoise data get {source}` downloads it" if cls.remotes else cls.how_to_get
    return MissingFile(f"the file {name} was not found in {places}; {get}, and --data names the folder")


def portion(have: int, of: int, unit: str = "samples") -> str:
    """Return a text such as '20,000 of 60,000 samples', or an empty one if it is all of them."""
    return "" if have >= of else f"{have:,} of {of:,} {unit}"
