"""An experiment as TOML: read strictly, written out with every default."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import randomness
from equipoise.algorithm import Algorithm
from equipoise.algorithms import ALGORITHMS
from equipoise.data.federation import SPLIT, Federation, check_split, from_shares
from equipoise.data.noise import with_noise
from equipoise.data.partitions import PARTITIONS
from equipoise.data.partitions.base import Partition
from equipoise.data.pool import Pool
from equipoise.data.source import Progress, Request, Source
from equipoise.data.sources import SOURCES
from equipoise.engine.options import DTYPES, Engine, Schedule
from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from equipoise.models.base import ModelSettings
from equipoise.runfolder import WRITTEN, read_toml
from equipoise.settings import Count, Fraction, Settings, choose, nearest, read
from equipoise.task import Task

_SECTIONS = ("data", "model", "algorithm", "engine")


class DataSettings(Settings):
    """Which data, and how they are dealt to the clients."""

    clients: Count | None = None
    "how many clients; may be left out where the data name their owners"
    split: tuple[float, float, float] | None = None
    "train, validation and test part of every client's share: 0.7, 0.1, 0.2 where it is not given"
    unseen: Fraction = 0.0
    "which part of the clients takes no part in training; they adapt the result to their data and are scored apart"


@dataclass(frozen=True)
class Experiment:
    schedule: Schedule
    data_name: str
    data: DataSettings
    source: Source
    partition: Partition
    model_name: str
    model: ModelSettings
    algorithm_name: str
    algorithm: Algorithm
    engine: Engine

    @staticmethod
    def parse(tables: Mapping[str, Any]) -> "Experiment":
        tables = {k: v for k, v in tables.items() if k != WRITTEN}
        for key, value in tables.items():
            known = [*_SECTIONS, *Schedule.model_fields]
            if key not in known:
                raise EquipoiseError(
                    f"unknown {'section' if isinstance(value, dict) else 'setting'} {key}{nearest(key, known)}"
                )
            if key in _SECTIONS and not isinstance(value, dict):
                raise EquipoiseError(f"{key} = {value!r} is not allowed; it must be a section, [{key}]")
        for section in ("data", "model", "algorithm"):
            if section not in tables:
                raise EquipoiseError(f"the section [{section}] is missing")
        schedule = read(Schedule, {k: v for k, v in tables.items() if k not in _SECTIONS}, "")
        data_name, data, source, partition = _read_data(dict(tables["data"]))
        model_name, model = choose(MODELS, dict(tables["model"]), "model")
        algorithm_name, algorithm = choose(ALGORITHMS, dict(tables["algorithm"]), "algorithm")
        engine = read(Engine, tables.get("engine", {}), "engine")
        return Experiment(
            schedule, data_name, data, source, partition, model_name, model, algorithm_name, algorithm, engine
        )

    @staticmethod
    def load(path: Path, sets: Sequence[str] = ()) -> "Experiment":
        return Experiment.parse(override(read_toml(path), sets))

    def tables(self) -> dict[str, Any]:
        """The whole configuration, every default written out."""
        return {
            **self.schedule.table(),
            "data": {
                "name": self.data_name,
                **self.data.table(),
                **self.source.table(),
                "partition": self.partition.table(),
            },
            "model": {"name": self.model_name, **self.model.table()},
            "algorithm": {"name": self.algorithm_name, **self.algorithm.table()},
            "engine": self.engine.table(),
        }

    def pool(self, folder: Path, progress: Progress = lambda done, total: None) -> Pool:
        """All samples, before they are dealt to clients."""
        split = self.data.split or SPLIT
        return self.source.load(Request(folder, self.data.clients, split, self.schedule.seed, progress))

    def federation(self, folder: Path, progress: Progress = lambda done, total: None) -> Federation:
        pool = self.pool(folder, progress)
        seed = self.schedule.seed
        shares = self.partition(pool, self.data.clients, randomness.generator(seed, "partition"))
        x = with_noise(pool.x, shares, self.partition.variances(len(shares)), seed)
        federation = from_shares(x, pool.y, shares, self.data.split or SPLIT, seed, pool.classes, pool.part)
        return federation.holding_out(self.data.unseen, seed).called(self._title(pool), pool.notes)

    def _title(self, pool: Pool) -> str:
        """What stands in tables; a portion of the data never goes under the name of the whole."""
        return f"{self.data_name} ({pool.portion})" if pool.portion else self.data_name

    def module(self, federation: Federation) -> nn.Module:
        """The initial model; every seed has its own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(randomness.key(self.schedule.seed, "model") % 2**63)
            return self.model.build(tuple(federation.sample()[0].shape[1:]), federation.outputs)

    def task(self, federation: Federation) -> Task:
        dtype = DTYPES[self.engine.dtype]
        module = self.module(federation)
        loss = "squared" if federation.classes is None else "cross-entropy"
        return Task(module, federation.prepared(dtype, False).sample(), loss=loss, dtype=dtype)


def _read_data(given: dict[str, Any]) -> tuple[str, DataSettings, Source, Partition]:
    """The section [data]: what every data set may be told, what this one may, and the partition."""
    divided = given.pop("partition", {"kind": "natural"})
    if not isinstance(divided, dict):
        raise EquipoiseError(
            f'data.partition = {divided!r} is not allowed; it must be a table such as {{ kind = "iid" }}'
        )
    ours = {key: given.pop(key) for key in DataSettings.model_fields if key in given}
    data_name, source = _source(given)
    data = read(DataSettings, ours, "data")
    if source.draws and data.split is not None:
        raise EquipoiseError(
            f"data.split is not for data.name = {data_name!r}, which draws samples for validation and test itself; "
            f"leave it out (`equipoise list data` shows what {data_name} can be told)"
        )
    if not source.draws:
        data = data.model_copy(update={"split": data.split or SPLIT})
    check_split(data.split or SPLIT)
    return data_name, data, source, choose(PARTITIONS, divided, "data.partition", "kind")[1]


def _source(given: dict[str, Any]) -> tuple[str, Source]:
    """The data set; a misspelt key is looked up among all that [data] may hold."""
    name = given.get("name")
    if isinstance(name, str) and name in SOURCES:
        known = [*DataSettings.model_fields, "partition", *SOURCES[name].model_fields]
        for key in given:
            if key != "name" and key not in known:
                raise EquipoiseError(f"unknown setting data.{key}{nearest(key, known)}")
    return choose(SOURCES, given, "data")


def override(tables: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """`section.key=value` on top; the value is written as in TOML, and quotes around words may be left out."""
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals or not key.strip() or key.strip().split(".")[0] == WRITTEN:
            raise EquipoiseError(f"--set {item} is not allowed; it must be section.key=value, such as algorithm.lr=0.1")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        *path, last = key.strip().split(".")
        table = tables
        for step in path:
            table = table.setdefault(step, {})
            if not isinstance(table, dict):
                raise EquipoiseError(f"--set {item} is not allowed; {step} is a setting, not a section")
        table[last] = value
    return tables
