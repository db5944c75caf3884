"""The user's own loads: one table with a column per client, or a folder with a file per client."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, model_validator

from equipoise.data.clocks import DAY, check_zone
from equipoise.data.load_tables import Gaps, LoadFormat, LoadTable, read_loads_of
from equipoise.data.next_window import input_at
from equipoise.data.own_paths import own_path
from equipoise.data.pool import Pool
from equipoise.data.series_facts import SeriesFacts
from equipoise.data.source import LoadRequest, Source
from equipoise.data.table_files import TABLES
from equipoise.data.text_encoding import check_name
from equipoise.data.window_samples import SeriesSet, pool_of_loads
from equipoise.data.windows import Name, WindowSettings
from equipoise.errors import EquipoiseError
from equipoise.settings import Count

_Character = Annotated[str, Field(min_length=1, max_length=1)]
_SHOWN = 5  # notes of one kind


class Loads(WindowSettings, Source):
    """Your own loads: a CSV or Parquet table with one column per client, or a folder with one file per client."""

    own: ClassVar[bool] = True
    chronological: ClassVar[bool] = True

    path: str = ""
    "table with a column of times and one column per client, or folder with one file per client; default: --data"
    time: Name | None = None
    "column of times; by default the first"
    target: Name | None = None
    "column of the load in files of one client each; by default the only one besides times and exogenous columns"
    exogenous: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    'further columns that are inputs, such as ["temperature"]; in a table of all clients they belong to all of them'
    exogenous_known: bool = True
    "whether exogenous values are known in advance, as in a forecast of the weather; if not, the last one is the input"
    delimiter: _Character = ","
    "character between two values of a CSV file"
    decimal: _Character = "."
    "character before the decimals of a number"
    time_format: Name | None = None
    'notation of times, such as "%d.%m.%Y %H:%M"; by default ISO 8601: 2014-03-30 01:00, perhaps with an offset'
    timezone: Name | None = None
    "time zone of the places, such as Europe/Lisbon, for times with daylight saving; left out: the clock has none"
    resample: Annotated[Count, Field(le=DAY)] | None = None
    "number of minutes over which finer values are averaged, such as 60"
    gaps: Gaps = "skip"
    "missing values: no sample touches one (skip), short gaps in inputs are filled by straight lines, or an error"
    longest_gap: Count = 4
    "largest number of missing values in a row that are filled"
    unit: str = "kW"
    "unit of the values, for tables and plots"

    @model_validator(mode="after")
    def _formats_are_possible(self) -> "Loads":
        if self.timezone is not None:
            check_zone(self.timezone)
        if self.resample is not None and DAY % self.resample:
            raise EquipoiseError(
                f"data.resample = {self.resample} does not divide a day; it must, such as 15, 30, 60 or 1440 minutes"
            )
        if self.decimal == self.delimiter:
            raise EquipoiseError(
                f"data.decimal = {self.decimal!r} is also data.delimiter; with decimal commas it is usually ';'"
            )
        return self

    def title(self, name: str) -> str:
        """Return the name of the file or folder."""
        return Path(self.path).name or name

    def load(self, ask: LoadRequest) -> Pool:
        """Read all tables, and return the windows of all clients."""
        place = own_path(self.path, ask, files=True)
        if place.is_dir():
            files, notes = _files(place)
        elif place.suffix in TABLES:
            files, notes = {None: place}, []
        else:
            raise EquipoiseError(f"{place} is not a table of loads; it must be a {' or '.join(TABLES)} file")
        tables: dict[Path, LoadTable] = {}
        for done, (client, file) in enumerate(files.items()):
            tables[file] = read_loads_of(file, self._format, client)
            ask.progress(done + 1, len(files))
        pool = self._pool(tables, ask, place)
        return replace(pool, notes=(*notes, *pool.notes))

    def load_client(self, path: Path, name: str, ask: LoadRequest) -> Pool | None:
        if path.is_dir() or path.suffix not in TABLES:
            return None
        return self._pool({path: read_loads_of(path, self._format, name)}, ask, path)

    def _pool(self, tables: dict[Path, LoadTable], ask: LoadRequest, place: Path) -> Pool:
        """Return the windows of all clients in these tables, with notes about gaps."""
        step = _common_step(tables)
        series = {name: own for table in tables.values() for name, own in table.series.items()}
        zone = next(iter(tables.values())).zone
        data = SeriesSet(series, step, self.unit, zone, len(self._format.exogenous), self.exogenous_known)
        pool = pool_of_loads(self, data, ask, place)
        gaps = [note for table in tables.values() for note in table.notes]
        return replace(pool, notes=(*_some(gaps, "series have gaps"), *pool.notes))

    def next_input(self, series: SeriesFacts, owner: int, place: int) -> np.ndarray:
        return input_at(self, series, owner, place)

    @property
    def fills(self) -> int:
        """Return how many missing values in a row are filled; none of averages, whose finer values are not kept."""
        return self.longest_gap if self.gaps == "interpolate" and self.resample is None else 0

    @property
    def _format(self) -> LoadFormat:
        own = {key: getattr(self, key) for key in LoadFormat.__dataclass_fields__}
        return LoadFormat(**own | {"exogenous": self.exogenous or ()})


def _files(folder: Path) -> tuple[dict[str | None, Path], list[str]]:
    """Return the file of each client in a folder, named after it, and a note about other files."""
    found: dict[str | None, Path] = {}
    ignored = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__")):
            continue
        if path.is_dir() or path.suffix not in TABLES:
            ignored.append(path.name)
            continue
        check_name(path, path.stem)
        if path.stem in found:
            raise EquipoiseError(f"{found[path.stem]} and {path.name} have one name; rename or remove one of them")
        found[path.stem] = path
    if not found:
        raise EquipoiseError(f"{folder} has no loads: put one {' or '.join(TABLES)} file per client there")
    return found, [f"files that are no data are not used: {', '.join(ignored[:_SHOWN])}"] if ignored else []


def _common_step(tables: dict[Path, LoadTable]) -> int:
    (first, one), *others = tables.items()
    for path, table in others:
        if table.step != one.step:
            raise EquipoiseError(
                f"{first} has a value every {one.step} minutes, but {path.name} every {table.step}; "
                f"set data.resample = {max(one.step, table.step)}"
            )
    return one.step


def _some(notes: list[str], what: str) -> list[str]:
    """Return the first notes, and how many more there are."""
    more = len(notes) - _SHOWN
    return [*notes[:_SHOWN], *([f"{more} more {what}"] if more > 0 else [])]
