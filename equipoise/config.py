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
from equipoise.data.federation import Federation, check_split, from_shares
from equipoise.data.partitions import PARTITIONS, Partition
from equipoise.data.sources import SOURCES
from equipoise.engine.options import DTYPES, Engine, Schedule
from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from equipoise.models.base import ModelSettings
from equipoise.runfolder import WRITTEN, read_toml
from equipoise.settings import Count, S, Settings, nearest, read
from equipoise.task import Task

_SECTIONS = ("data", "model", "algorithm", "engine")


class DataSettings(Settings):
    """Which data, and how they are dealt to the clients."""

    name: str
    "a data set; see `equipoise list data`"
    clients: Count | None = None
    "how many clients; may be left out where the data name their owners"
    split: tuple[float, float, float] = (0.7, 0.1, 0.2)
    "train, validation and test part of every client's share"


def _named(registry: Mapping[str, type[S]], table: dict[str, Any], where: str, key: str = "name") -> tuple[str, S]:
    """The settings of the thing that `table` names, and its name."""
    if key not in table:
        raise EquipoiseError(f"{where}.{key} is missing; there is {', '.join(registry)}")
    name = table[key]
    if not isinstance(name, str) or name not in registry:
        raise EquipoiseError(f"{where}.{key} = {name!r} is unknown{nearest(str(name), registry)}")
    fields = registry[name].model_fields
    return name, read(registry[name], {k: v for k, v in table.items() if k != key or key in fields}, where)


@dataclass(frozen=True)
class Experiment:
    schedule: Schedule
    data: DataSettings
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
        given = dict(tables["data"])
        divided = given.pop("partition", {"kind": "natural"})
        if not isinstance(divided, dict):
            raise EquipoiseError(
                f'data.partition = {divided!r} is not allowed; it must be a table such as {{ kind = "iid" }}'
            )
        for key in given:
            if key not in DataSettings.model_fields:
                raise EquipoiseError(
                    f"unknown setting data.{key}{nearest(key, [*DataSettings.model_fields, 'partition'])}"
                )
        data = read(DataSettings, given, "data")
        if data.name not in SOURCES:
            raise EquipoiseError(f"data.name = {data.name!r} is unknown{nearest(data.name, SOURCES)}")
        check_split(data.split)
        _, partition = _named(PARTITIONS, divided, "data.partition", "kind")
        model_name, model = _named(MODELS, dict(tables["model"]), "model")
        algorithm_name, algorithm = _named(ALGORITHMS, dict(tables["algorithm"]), "algorithm")
        engine = read(Engine, tables.get("engine", {}), "engine")
        return Experiment(schedule, data, partition, model_name, model, algorithm_name, algorithm, engine)

    @staticmethod
    def load(path: Path, sets: Sequence[str] = ()) -> "Experiment":
        return Experiment.parse(override(read_toml(path), sets))

    def tables(self) -> dict[str, Any]:
        """The whole configuration, every default written out."""
        return {
            **self.schedule.table(),
            "data": {**self.data.table(), "partition": self.partition.table()},
            "model": {"name": self.model_name, **self.model.table()},
            "algorithm": {"name": self.algorithm_name, **self.algorithm.table()},
            "engine": self.engine.table(),
        }

    def federation(self, folder: Path) -> Federation:
        pool = SOURCES[self.data.name].load(folder)
        seed = self.schedule.seed
        shares = self.partition(pool, self.data.clients, randomness.generator(seed, "partition"))
        return from_shares(pool.x, pool.y, shares, self.data.split, seed, pool.classes)

    def module(self, shape: tuple[int, ...], classes: int | None) -> nn.Module:
        """The initial model; every seed has its own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(randomness.key(self.schedule.seed, "model") % 2**63)
            return self.model.build(shape, classes or 1)

    def task(self, federation: Federation) -> Task:
        dtype = DTYPES[self.engine.dtype]
        module = self.module(tuple(federation.x.shape[1:]), federation.classes)
        loss = "squared" if federation.classes is None else "cross-entropy"
        return Task(module, federation.prepared(dtype, False).sample(), loss=loss, dtype=dtype)


def override(tables: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """`section.key=value` on top; the value is written as in TOML, and quotes around words may be left out."""
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals or not key.strip() or key.strip().startswith(f"{WRITTEN}."):
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
