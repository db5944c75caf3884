"""The section [data] of an experiment: which data, how they are dealt, and the federation that comes of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from equipoise import randomness
from equipoise.data.federation import SPLIT, Federation, check_split, from_shares
from equipoise.data.input_noise import with_noise
from equipoise.data.partitions import PARTITIONS
from equipoise.data.partitions.base import Partition
from equipoise.data.source import DataProgress, LoadRequest, Source
from equipoise.data.sources import SOURCES, data_folder
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, Fraction, Positive, Settings, choose, nearest, read


class DataSettings(Settings):
    """What every data set may be told."""

    clients: Count | None = None
    "how many clients; may be left out where the data name their owners"
    only: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    "the names of the clients to take, where not all that the data and their partition give are wanted"
    split: tuple[float, float, float] | None = None
    "train, validation and test part of every client's share: 0.7, 0.1, 0.2 where it is not given"
    normalize: tuple[float, Positive] | None = None
    "a mean that is taken off the inputs and a deviation that they are divided by, before any noise is added"
    most: Count | None = None
    "no client trains on more samples than this, drawn from the seed; those for validation and test stay all"
    unseen: Fraction = 0.0
    "which part of the clients takes no part in training; they adapt the result to their data and are scored apart"


@dataclass(frozen=True)
class DataSection:
    name: str
    dealing: DataSettings
    source: Source
    partition: Partition

    @staticmethod
    def parse(table: dict[str, Any]) -> "DataSection":
        given = dict(table)
        divided = given.pop("partition", {"kind": "natural"})
        if not isinstance(divided, dict):
            raise EquipoiseError(
                f'data.partition = {divided!r} is not allowed; it must be a table such as {{ kind = "iid" }}'
            )
        general = {key: given.pop(key) for key in DataSettings.model_fields if key in given}
        name, source = _source(given)
        dealing = read(DataSettings, general, "data")
        if source.draws and dealing.split is not None:
            raise EquipoiseError(
                f"data.split is not for data.name = {name!r}, which draws samples for validation and test itself; "
                f"leave it out (`equipoise list data` shows what {name} can be told)"
            )
        if not source.draws:
            dealing = dealing.model_copy(update={"split": dealing.split or SPLIT})
        check_split(dealing.split or SPLIT)
        return DataSection(name, dealing, source, choose(PARTITIONS, divided, "data.partition", "kind")[1])

    def table(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **self.dealing.table(),
            **self.source.table(),
            "partition": self.partition.table(),
        }

    def federation(self, folder: Path, seed: int, progress: DataProgress = lambda done, total: None) -> Federation:
        clients, split = self.dealing.clients, self.dealing.split or SPLIT
        pool = self.source.load(LoadRequest(folder, clients, split, seed, progress))
        shares = self.partition(pool, clients, randomness.generator(seed, "partition"))
        x = pool.x
        if self.dealing.normalize is not None:
            if not x.is_floating_point():
                raise EquipoiseError(f"data.normalize is for inputs that are numbers; those of {self.name} are symbols")
            mean, deviation = self.dealing.normalize
            x = (x - mean) / deviation
        x = with_noise(x, shares, self.partition.variances(len(shares)), seed)
        federation = from_shares(x, pool.y, shares, split, seed, pool.classes, pool.part)
        # What stands in tables: a portion of the data never goes under the name of the whole.
        portions = [pool.portion, f"at most {self.dealing.most} a client to train with" if self.dealing.most else ""]
        portions += [f"{len(set(self.dealing.only))} of {len(federation)} clients"] if self.dealing.only else []
        portion = "; ".join(text for text in portions if text)
        title = f"{self.name} ({portion})" if portion else self.name
        federation = federation.keeping(self.dealing.only).training_on(self.dealing.most, seed)
        return federation.holding_out(self.dealing.unseen, seed).called(title, pool.notes)


def _source(given: dict[str, Any]) -> tuple[str, Source]:
    """The data set; a misspelt key is looked up among all that [data] may hold."""
    name = given.get("name")
    if isinstance(name, str) and name in SOURCES:
        known = [*DataSettings.model_fields, "partition", *SOURCES[name].model_fields]
        for key in given:
            if key != "name" and key not in known:
                raise EquipoiseError(f"unknown setting data.{key}{nearest(key, known)}")
    return choose(SOURCES, given, "data")


def load_data(name: str, *, seed: int = 0, data: str | Path | None = None, **settings: Any) -> Federation:
    """A federation of a data set by name, for `train`.

    `settings` are those of the section [data]: clients, partition (a dictionary with "kind"), split, unseen, and what
    the data set itself may be told. `data` is the folder of its files; else $EQUIPOISE_DATA, else ./data.
    """
    section = DataSection.parse({"name": name, **settings})
    return section.federation(data_folder(None if data is None else Path(data)), seed)
