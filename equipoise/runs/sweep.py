"""Many runs from one file: wherever a setting is a list of values, every value is run with every other.

What belongs together (an algorithm with its model) stands in a `[[variant]]`, which is laid over the rest of the file;
`[scale.small]` and the like are laid over both when that scale is asked for. Settings named in `sweep.tune` are chosen
on validation samples with the first seed, and kept for the other seeds.
"""

import copy
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any, Literal

from equipoise.algorithms import ALGORITHMS
from equipoise.attacks import ATTACKS
from equipoise.config.deployment import Deploy
from equipoise.config.device_classes import Devices
from equipoise.config.engine import Schedule
from equipoise.config.experiment import Experiment, override
from equipoise.data.config import DataSettings
from equipoise.data.partitions import PARTITIONS
from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from equipoise.reducers import REDUCERS
from equipoise.settings import Settings, read
from equipoise.storage.run_folder import ASIDE, RunFolder, flatten
from equipoise.storage.run_index import higher_is_better

SECTION, VARIANT, SCALE = "sweep", "variant", "scale"
USUAL = "small"
"""The scale that is run where none is asked for."""
FAILED = "failed.json"
"""In the folder of a run that came to nothing, with the reason; it is not tried again while the file is there."""
_NOT_THE_RUN = ("seed", *ASIDE)


class Sweep(Settings):
    """How runs are chosen among."""

    tune: tuple[str, ...] = ()
    "settings whose best value is chosen on validation samples with the first seed, such as algorithm.lr"
    by: Literal["personal", "global", "hybrid"] = "personal"
    "the model whose score on validation samples decides"


_REGISTRIES: dict[str, Mapping[str, type[Settings]]] = {
    "data": SOURCES,
    "partition": PARTITIONS,
    "model": MODELS,
    "algorithm": ALGORITHMS,
    "attack": ATTACKS,
    "reducer": REDUCERS,
}
_ALWAYS: dict[str, type[Settings]] = {"data": DataSettings, "devices": Devices, "deploy": Deploy, "": Schedule}


@cache
def _list_settings(section: str, name: str) -> frozenset[str]:
    """Settings of a section whose value is itself a list; of these, only a list of lists is many values."""
    classes = [_ALWAYS[section]] if section in _ALWAYS else []
    if (own := _REGISTRIES.get(section, {}).get(name)) is not None:
        classes.append(own)
    return frozenset(row["name"] for cls in classes for row in cls.describe() if "a list" in row["allowed"])


def grid(tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values that are listed, the last one changing fastest."""

    def values(section: str, named: str, key: str, value: Any) -> Iterator[Any]:
        """All that a setting may be, in a section of which `named` is the name or kind."""
        if isinstance(value, Mapping):
            own = str(value.get("name", value.get("kind", "")))
            section = "partition" if key in ("first", "second") else key
            parts = [list(values(section, own, name, inner)) for name, inner in value.items()]
            for choice in itertools.product(*parts):
                yield dict(zip(value, choice, strict=True))
        elif isinstance(value, list) and not (
            key in _list_settings(section, named) and not (value and isinstance(value[0], list))
        ):
            if not value:
                name = f"{section}.{key}" if section else key
                raise EquipoiseError(f"{name} = [] is not allowed; a list of values needs at least one")
            for item in value:
                yield from values(section, named, key, item) if isinstance(item, Mapping) else iter((item,))
        else:
            yield value

    found: list[dict[str, Any]] = list(values("", "", "", dict(tables)))
    return found


@lru_cache(maxsize=64)
def _by_ending(out: Path, changed: int) -> dict[str, str]:
    """The runs in a folder by identity and seed, read once for each time that it changes: sweeps may have thousands."""
    names = sorted((entry.name for entry in os.scandir(out)), reverse=True)
    return {"-".join(name.rsplit("-", 2)[-2:]): name for name in names}


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    experiment: Experiment
    identity: str
    "stands for all its settings but the seed"
    label: str

    @property
    def seed(self) -> int:
        return self.experiment.schedule.seed

    def folder(self, out: Path) -> Path:
        """Where it is, under whatever label; or where it is to be."""
        ending = f"{self.identity}-seed{self.seed}"
        try:
            there = _by_ending(out, out.stat().st_mtime_ns)
        except FileNotFoundError:
            there = {}
        return out / there.get(ending, f"{self.label}-{ending}")

    def done(self, out: Path) -> bool:
        return RunFolder(self.folder(out)).summary.exists()

    def failed(self, out: Path) -> bool:
        return not self.done(out) and (self.folder(out) / FAILED).exists()


def merge_tables(tables: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with other values on top; what has another name or kind takes the place of what was there."""
    merged = dict(tables)
    for key, value in over.items():
        below = merged.get(key)
        if not isinstance(value, Mapping) or "name" in value or "kind" in value:
            merged[key] = value
        elif isinstance(below, list) and all(isinstance(each, Mapping) for each in below):
            merged[key] = [merge_tables(each, value) for each in below]
        else:
            merged[key] = merge_tables(below, value) if isinstance(below, Mapping) else dict(value)
    return merged


def variants(tables: Mapping[str, Any], scale: str | None = None) -> list[dict[str, Any]]:
    """The file as many files, one a variant, at the scale that is asked for."""
    each = tables.get(VARIANT, [{}])
    if not isinstance(each, list) or not each or not all(isinstance(variant, Mapping) for variant in each):
        raise EquipoiseError(f"{VARIANT} is not allowed so; it must be a list of sections, [[{VARIANT}]]")
    for variant in each:
        if SECTION in variant:
            raise EquipoiseError(f"a variant cannot have a section [{SECTION}]; it is for the whole file")
    base = {k: v for k, v in tables.items() if k != VARIANT}
    return [_scaled(merge_tables(base, variant), scale) for variant in each]


def scales(tables: Mapping[str, Any]) -> list[str]:
    """The scales that a file has."""
    found = dict.fromkeys(tables.get(SCALE, {}))
    for variant in tables.get(VARIANT, ()):
        found |= dict.fromkeys(variant.get(SCALE, {}))
    return list(found)


def _scaled(tables: dict[str, Any], scale: str | None) -> dict[str, Any]:
    scales = tables.pop(SCALE, {})
    if not isinstance(scales, Mapping) or not all(isinstance(over, Mapping) for over in scales.values()):
        raise EquipoiseError(f"{SCALE} is not allowed so; it must be sections, such as [{SCALE}.small]")
    if scale is None:
        if USUAL not in scales:
            return tables
        scale = USUAL
    if scale not in scales:
        known = f"it has {', '.join(scales)}" if scales else "it has none"
        raise EquipoiseError(f"the file has no scale {scale!r}; {known}")
    return merge_tables(tables, scales[scale])


def _settings(experiment: Experiment) -> dict[str, Any]:
    return {k: v for k, v in flatten(experiment.tables()).items() if not k.startswith(_NOT_THE_RUN)}


def expand_sweep(
    tables: Mapping[str, Any], scale: str | None = None, sets: Sequence[str] = (), others: bool = True
) -> tuple[list[SweepRun], Sweep]:
    """All runs that a file asks for, checked before any of them begins; `sets` come on top of all that is in it.

    What is wrong at the `others` of its scales is told now too, and not when they are asked for.
    """
    tables = override(copy.deepcopy(dict(tables)), [item for item in sets if item.startswith(f"{SECTION}.")])
    rest = [item for item in sets if not item.startswith(f"{SECTION}.")]
    if not isinstance(tables.get(SECTION, {}), dict):
        raise EquipoiseError(f"{SECTION} = {tables[SECTION]!r} is not allowed; it must be a section, [{SECTION}]")
    sweep = read(Sweep, tables.pop(SECTION, {}), SECTION)
    experiments = [
        Experiment.parse(each)
        for variant in variants(tables, scale)
        for each in grid(override(copy.deepcopy(variant), rest))
    ]
    for other in scales(tables) if others else ():
        for variant in variants(tables, other):
            for each in grid(variant):
                Experiment.parse(each)
    settings = [_settings(experiment) for experiment in experiments]
    varied = [k for k in sorted({k for s in settings for k in s}) if len({json.dumps(s.get(k)) for s in settings}) > 1]
    for key in sweep.tune:
        if key not in varied:
            raise EquipoiseError(f"sweep.tune names {key}, which has not several values; it must be a setting that has")
    found: dict[tuple[str, int], SweepRun] = {}  # what is listed twice is run once
    for experiment, own in zip(experiments, settings, strict=True):
        words = [experiment.algorithm_name, *(str(own[k]) for k in varied if k in own and k != "algorithm.name")]
        label = "-".join("".join(c for c in word if c.isalnum() or c in ".+") for word in words)[:60]
        cell = SweepRun(experiment, _digest(own), label)
        found.setdefault((cell.identity, cell.seed), cell)
    return list(found.values()), sweep


def _digest(settings: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()


def group(cell: SweepRun, tune: Sequence[str]) -> str:
    """Stands for all its settings but those that are tuned: the runs that it is measured with."""
    return _digest({k: v for k, v in _settings(cell.experiment).items() if k not in tune})


def _training(cell: SweepRun) -> str:
    """Stands for all that the training depends on: the same for methods that differ only in what they make of it."""
    settings = cell.experiment.tables() | {"algorithm": cell.experiment.algorithm.training_settings()}
    flat = {k: v for k, v in flatten(settings).items() if k not in ("select", "targets")}
    return _digest({k: v for k, v in flat.items() if k == "seed" or not k.startswith(_NOT_THE_RUN)})


def chains(every: Sequence[SweepRun]) -> list[list[SweepRun]]:
    """Runs with the same training, together: the first trains, and the others score what it came to."""
    found: dict[str, list[SweepRun]] = {}
    for cell in every:
        found.setdefault(_training(cell), []).append(cell)
    return list(found.values())


def tuned(every: Sequence[SweepRun], sweep: Sweep, out: Path) -> tuple[list[SweepRun], list[SweepRun]]:
    """Those that the first seed needs for choosing, and then those with the chosen values under all seeds.

    The second list is empty until the first is done.
    """
    first = every[0].seed
    trials = [cell for cell in every if cell.seed == first]
    if not sweep.tune:
        return [], list(every)
    if not all(cell.done(out) or cell.failed(out) for cell in trials):
        return trials, []
    best: dict[str, tuple[float, str]] = {}
    for cell in trials:
        value, kin = _worth(cell, sweep.by, out), group(cell, sweep.tune)
        if kin not in best or value > best[kin][0]:
            best[kin] = value, cell.identity
    chosen = {identity for _, identity in best.values()}
    return trials, [cell for cell in every if cell.identity in chosen]


def _worth(cell: SweepRun, by: str, out: Path) -> float:
    """Its score on validation samples, higher being better; nothing is worse than a run that failed or diverged."""
    if cell.failed(out):
        return -inf
    summary = RunFolder(cell.folder(out)).read_summary()
    # A method without such a model is judged by the one that it has.
    scores: dict[str, Any] = next((summary[kind] for kind in (by, "personal", "global") if kind in summary), {})
    name = f"validation_{summary['metric']}"
    if name not in scores:
        raise EquipoiseError(f"{cell.folder(out)} has no score on validation samples to choose by; set data.split")
    if scores[name] is None:
        return -inf
    return float(scores[name]) if higher_is_better(summary) else -float(scores[name])
