"""The section [data] of an experiment: the data set, how it is divided over clients, and the resulting federation."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from equipoise import randomness
from equipoise.data.federation import SPLIT, Federation, check_split, from_shares, split_sizes
from equipoise.data.input_noise import with_noise
from equipoise.data.partitions import PARTITIONS
from equipoise.data.partitions.base import Partition, Shares, own_copies
from equipoise.data.pool import Pool
from equipoise.data.series_facts import SeriesFacts
from equipoise.data.source import DataProgress, LoadRequest, Source
from equipoise.data.sources import SOURCES, data_folder
from equipoise.data.windows import WindowSettings
from equipoise.errors import EquipoiseError
from equipoise.registry import choose
from equipoise.settings import Count, Fraction, Number, Positive, Settings, nearest, read, shown


class DataSettings(Settings):
    """Settings that all data sets have in common."""

    clients: Count | None = None
    "number of clients; may be left out where the data name their owners"
    only: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    "names of the clients to keep, where not all clients of the partition are wanted"
    split: tuple[float, float, float] | None = None
    "fractions of every client's samples for training, validation and test; by default 0.7, 0.1, 0.2"
    normalize: tuple[Number, Positive] | None = None
    "mean to subtract from the inputs and standard deviation to divide them by, before any noise is added"
    most: Count | None = None
    "largest number of training samples per client, drawn from the seed; all validation and test samples are kept"
    min_test: Count | None = None
    "smallest number of test samples of a client; clients get, or owners must have, enough samples for it"
    unseen: Fraction = 0.0
    "fraction of the clients that do not train; they adapt the result to their data and are scored separately"
    unseen_history: Count | None = None
    "of time series: the number of values before their test part that these clients have to adapt with; left out: all"


@dataclass(frozen=True)
class DataSection:
    """The section [data], checked."""

    name: str
    dealing: DataSettings
    source: Source
    partition: Partition

    @staticmethod
    def parse(table: dict[str, Any]) -> "DataSection":
        """Check the section as read from TOML."""
        given = dict(table)
        divided = given.pop("partition", {"kind": "natural"})
        if not isinstance(divided, dict):
            raise EquipoiseError(
                f'data.partition = {shown(divided)} is not allowed; it must be a table such as {{ kind = "iid" }}'
            )
        general = {key: given.pop(key) for key in DataSettings.model_fields if key in given}
        name, source = _source(given)
        dealing = read(DataSettings, general, "data")
        if source.draws and dealing.split is not None:
            raise EquipoiseError(
                f"data.split cannot be set for data.name = {name!r}, which draws its own validation and test samples; "
                f"leave it out (`equipoise list data {name}` shows its settings)"
            )
        if not source.draws:
            dealing = dealing.model_copy(update={"split": dealing.split or SPLIT})
        check_split(dealing.split or SPLIT)
        kind, partition = choose(PARTITIONS, divided, "data.partition", "kind")
        if dealing.unseen_history is not None:
            _check_history(name, dealing, source, kind)
        return DataSection(name, dealing, source, partition)

    def table(self) -> dict[str, Any]:
        """Return the section as it is written to TOML, with every default."""
        return {
            "name": self.name,
            **self.dealing.table(),
            **self.source.table(),
            "partition": self.partition.table(),
        }

    def request(self, folder: Path, seed: int, folders: Sequence[Path] = ()) -> LoadRequest:
        """Return the request to load the data.

        Args:
            folder: the data folder.
            seed: the seed of the run.
            folders: folders in which relative paths of settings begin.
        """
        return LoadRequest(folder, self.dealing.clients, self.dealing.split or SPLIT, seed, folders=tuple(folders))

    def federation(
        self,
        folder: Path,
        seed: int,
        progress: DataProgress = lambda done, total: None,
        folders: Sequence[Path] = (),
    ) -> Federation:
        """Load the data, divide them over the clients, and return the federation.

        Args:
            folder: the data folder.
            seed: the seed of the run.
            progress: is called while the data are read.
            folders: folders in which relative paths of settings begin.
        """
        pool = self.source.load(replace(self.request(folder, seed, folders), progress=progress))
        whole = self._divided(pool, seed)
        # The title that tables show: it always tells when only a portion of the data is used.
        portions = [pool.portion, f"at most {self.dealing.most} a client to train with" if self.dealing.most else ""]
        portions += [f"{len(set(self.dealing.only))} of {len(whole)} clients"] if self.dealing.only else []
        portion = "; ".join(text for text in portions if text)
        title = self.source.title(self.name) + (f" ({portion})" if portion else "")
        federation = whole.keeping(self.dealing.only).training_on(self.dealing.most, seed)
        federation = federation.holding_out(self.dealing.unseen, seed).called(title, whole.notes)
        if self.dealing.unseen_history is not None:
            federation = self._with_short_history(federation, pool, self.dealing.unseen_history, seed)
        return replace(federation, origin=json.dumps([title, self.table()], sort_keys=True))

    def client(self, path: Path, name: str, seed: int, unseen: bool = False) -> Federation | None:
        """Return a client's own data, read from its file as the data set reads files.

        Args:
            path: the client's file.
            name: its name.
            seed: the seed of the run.
            unseen: whether it does not train.

        Returns:
            A federation of this client; None if the data set has no files of single clients, or this is none.
        """
        pool = self.source.load_client(path, name, self.request(path.parent, seed))
        if pool is None:
            return None
        if unseen and self.dealing.unseen_history is not None:
            assert pool.with_history is not None
            pool = pool.with_history({name}, self.dealing.unseen_history)
        federation = self._with_shares(pool, {name: np.arange(len(pool))}, np.zeros(1), seed)
        return federation.training_on(self.dealing.most, seed)

    def _divided(self, pool: Pool, seed: int) -> Federation:
        """Return the samples of a pool as a federation of all clients that the partition makes."""
        pool, shares = own_copies(pool, self._shares(pool, seed))
        return self._with_shares(pool, shares, self.partition.variances(len(shares)), seed)

    def _with_shares(self, pool: Pool, shares: Shares, noise: np.ndarray, seed: int) -> Federation:
        """Return the samples of a pool as a federation of clients with these shares, and noise on their inputs."""
        x = pool.x
        if self.dealing.normalize is not None:
            if not x.is_floating_point():
                raise EquipoiseError(f"data.normalize needs inputs that are numbers; those of {self.name} are symbols")
            mean, deviation = self.dealing.normalize
            x = (x - mean) / deviation
        x = with_noise(x, shares, noise, seed)
        federation = from_shares(x, pool.y, shares, self.dealing.split or SPLIT, seed, pool.classes, pool.part)
        return replace(
            federation,
            notes=pool.notes,
            series=pool.series,
            chronological=self.source.chronological,
            shared_inputs=self.source.shared_inputs,
            normalize=self.dealing.normalize or (0.0, 1.0),
        )

    def _shares(self, pool: Pool, seed: int) -> Shares:
        """Return the samples of each client, enough for its test part if the settings ask for that."""
        least, clients, rng = self.dealing.min_test, self.dealing.clients, randomness.generator(seed, "partition")
        if least is None:
            return self.partition(pool, clients, rng)
        if pool.part is not None:
            raise EquipoiseError(
                f"data.min_test has no effect for data.name = {self.name!r}, whose samples are divided already; "
                "leave it out"
            )
        split = self.dealing.split or SPLIT
        if not split[2]:
            raise EquipoiseError("data.min_test needs test samples; add a test part to data.split")
        samples = next(n for n in count(least) if split_sizes(n, split)[2] >= least)
        try:
            shares = self.partition.with_at_least(samples)(pool, clients, rng)
        except EquipoiseError as error:
            raise EquipoiseError(f"data.min_test = {least} is {samples} samples per client or more: {error}") from None
        short = next((name for name, rows in shares.items() if len(rows) < samples), None)
        if short is not None:  # a partition of the user's own
            raise EquipoiseError(
                f"data.min_test = {least} needs {samples} samples per client, and the partition gives {short!r} "
                f"{len(shares[short])}"
            )
        return shares

    def _with_short_history(self, federation: Federation, pool: Pool, values: int, seed: int) -> Federation:
        """Return the federation in which unseen clients have only this many values before their test part."""
        assert pool.with_history is not None
        short = self._divided(pool.with_history(federation.unseen, values), seed)
        names = [name for name in federation.names if name in short.names]
        unseen, lost = federation.unseen & set(names), len(federation) - len(names)
        if not unseen:
            raise EquipoiseError(
                f"data.unseen_history = {values} leaves no unseen client a sample to train on; give more, or none"
            )
        notes = (f"{lost} unseen clients are left out: nothing can be learned from their last {values} values",)
        short = short.keeping(names).training_on(self.dealing.most, seed)
        return replace(short.called(federation.title, federation.notes + (notes if lost else ())), unseen=unseen)

    def next_input(self, series: SeriesFacts, owner: int, place: int) -> np.ndarray:
        """Return the input from which values at a place in a series are forecast, as `Source.next_input`."""
        x = self.source.next_input(series, owner, place)
        mean, deviation = self.dealing.normalize or (0.0, 1.0)
        return np.asarray((x - mean) / deviation, dtype=x.dtype)


def _check_history(name: str, dealing: DataSettings, source: Source, partition: str) -> None:
    """Raise an error unless the history of unseen clients can be cut."""
    if not dealing.unseen:
        raise EquipoiseError("data.unseen_history needs data.unseen, the fraction of the clients that do not train")
    if not isinstance(source, WindowSettings):
        known = ", ".join(name for name in SOURCES if issubclass(SOURCES[name], WindowSettings))
        raise EquipoiseError(f"data.unseen_history is for time series; {name} has none, unlike {known}")
    if partition != "natural":
        raise EquipoiseError(
            f"data.unseen_history needs clients that own their series, but data.partition.kind = {partition!r} mixes "
            'them; use "natural"'
        )


def _source(given: dict[str, Any]) -> tuple[str, Source]:
    """Return the data set's name and settings; suggestions for misspelt keys come from all keys of [data]."""
    if "name" in given:
        cls = SOURCES.find(given["name"], "data.name")
        known = [*DataSettings.model_fields, "partition", *cls.model_fields]
        for key in given:
            if key != "name" and key not in known:
                raise EquipoiseError(f"unknown setting data.{key}{nearest(key, known)}")
    return choose(SOURCES, given, "data")


def load_data(name: str, *, seed: int = 0, data: str | Path | None = None, **settings: Any) -> Federation:
    """Load a data set by name as a federation, for `train`.

    Args:
        name: the name of the data set, as in `equipoise list data`.
        seed: the seed of the partition, of the split, and of data that are drawn.
        data: the folder of the data set's files; by default $EQUIPOISE_DATA, else ./data.
        settings: the settings of the section [data]: clients, partition (a dictionary with "kind"), split, unseen and
            others, and those of the data set itself.

    Returns:
        The federation.
    """
    section = DataSection.parse({"name": name, **settings})
    return section.federation(data_folder(None if data is None else Path(data)), seed)
