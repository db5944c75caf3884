"""Expansion of one file into many runs: if settings are lists of values, all combinations are run.

Settings that belong together (an algorithm and its model) go into a `[[variant]]`, which overrides the rest of the
file; a section such as `[scale.small]` overrides both when that scale is chosen. The best values of the settings in
`sweep.tune` are chosen on validation samples, and used with all seeds (`tuning`).
"""

import copy
import itertools
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

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
from equipoise.registry import Registry, short_name, use_folders
from equipoise.settings import Count, Settings, read, shown
from equipoise.storage.run_folder import ASIDE, CALLBACKS, FAILED, RunFolder, flatten

SECTION, VARIANT, SCALE = "sweep", "variant", "scale"
USUAL = "small"
"""The default scale, in files that have it."""
_MOST_RUNS = 100_000
_NOT_THE_RUN = ("seed", *ASIDE)


class Sweep(Settings):
    """How the best runs are chosen."""

    tune: tuple[str, ...] = ()
    "settings whose best value is chosen on validation samples, such as algorithm.lr"
    by: Literal["personal", "global", "hybrid", "unseen"] = "personal"
    "kind of model whose score on validation samples decides; unseen: the adapted models of unseen clients"
    tune_rounds: Count | None = None
    "largest number of rounds of the trials, which are then runs of their own; left out: that of the runs"
    tune_seed: Annotated[int, Field(ge=0)] | None = None
    "seed of the trials, other than those of the runs; left out: the first seed of the runs"
    tune_honest: bool = False
    "whether trials have no malicious clients; runs under all attacks then share one choice, made without any"

    @property
    def together(self) -> tuple[str, ...]:
        """Return the settings (and sections) in which runs may differ whose values are chosen by the same trials."""
        rounds = ("rounds",) if self.tune_rounds is not None else ()
        return (*self.tune, *rounds, *(("attack",) if self.tune_honest else ()))


_REGISTRIES: dict[str, Registry[Any]] = {
    "data": SOURCES,
    "partition": PARTITIONS,
    "model": MODELS,
    "algorithm": ALGORITHMS,
    "attack": ATTACKS,
    "reducer": REDUCERS,
}
_NESTED = {"first": "partition", "second": "partition", "inner": "attack", "of": "attack"}
"""Tables in a section that are of the kind of a section."""
_ALWAYS: dict[str, type[Settings]] = {"data": DataSettings, "devices": Devices, "deploy": Deploy, "": Schedule}


def _depth(value: Any) -> int:
    """Return how deep lists are in lists; 0 for what is no list."""
    return 1 + (_depth(value[0]) if value else 0) if isinstance(value, list) else 0


def _list_settings(section: str, name: str) -> dict[str, int]:
    """Return the settings of a section whose value is itself a list, and how deep; deeper lists are many values."""
    found = dict(_lists_of(_ALWAYS[section])) if section in _ALWAYS else {}
    found |= {CALLBACKS: 1} if section == "" else {}
    if section in _REGISTRIES and name:
        with suppress(EquipoiseError):  # a name that is wrong is reported when the run is checked
            cls: type[Settings] = _REGISTRIES[section].find(name, section)
            found |= _lists_of(cls)
    return found


@cache
def _lists_of(cls: type[Settings]) -> Mapping[str, int]:
    lists = {row["name"]: row["allowed"] for row in cls.describe() if "a list" in row["allowed"]}
    return {name: 2 if "a list, each a list" in allowed else 1 for name, allowed in lists.items()}


def grid(tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all combinations of the listed values, the last setting changing fastest."""

    def values(section: str, named: str, key: str, value: Any) -> Iterator[Any]:
        """Yield all values of a setting; `named` is the name or kind of its section."""
        if isinstance(value, Mapping):
            own = value.get("name", value.get("kind", ""))
            own = own if isinstance(own, str) else ""
            section = _NESTED.get(key, key)
            parts = [list(values(section, own, name, inner)) for name, inner in value.items()]
            if (runs := math.prod(map(len, parts))) > _MOST_RUNS:
                raise EquipoiseError(f"the file describes {runs:.3g} runs; it must be at most {_MOST_RUNS:,}")
            for choice in itertools.product(*parts):
                yield dict(zip(value, choice, strict=True))
        elif isinstance(value, list) and not (
            key in (known := _list_settings(section, named)) and _depth(value) <= known[key]
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
    """Return the runs in a folder by identity and seed, reading it only when it changed: sweeps may have thousands."""
    names = sorted((entry.name for entry in os.scandir(out)), reverse=True)
    return {"-".join(name.rsplit("-", 2)[-2:]): name for name in names}


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    experiment: Experiment
    identity: str
    "digest of all its settings except the seed"
    label: str
    varied: tuple[str, ...] = ()
    "settings that have several values in the sweep"

    @staticmethod
    def of(experiment: Experiment, label: str, varied: tuple[str, ...] = ()) -> "SweepRun":
        """Return the run of an experiment."""
        return SweepRun(experiment, digest_of(run_settings(experiment)), label, varied)

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.experiment.schedule.seed

    def folder(self, out: Path) -> Path:
        """Return the run folder, which may exist under another label."""
        ending = f"{self.identity}-seed{self.seed}"
        try:
            there = _by_ending(out, out.stat().st_mtime_ns)
        except FileNotFoundError:
            there = {}
        return out / there.get(ending, f"{self.label}-{ending}")

    def done(self, out: Path) -> bool:
        """Tell whether the run is finished."""
        return RunFolder(self.folder(out)).summary.exists()

    def failed(self, out: Path) -> bool:
        """Tell whether the run failed."""
        return not self.done(out) and (self.folder(out) / FAILED).exists()


def merge_tables(tables: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with the values of `over` on top; a section with a name or kind replaces the whole section."""
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
    """Return the tables of each variant of a file, at the given scale."""
    each = tables.get(VARIANT, [{}])
    if not isinstance(each, list) or not each or not all(isinstance(variant, Mapping) for variant in each):
        raise EquipoiseError(f"{VARIANT} has the wrong form; it must be a list of sections, [[{VARIANT}]]")
    for variant in each:
        if SECTION in variant:
            raise EquipoiseError(f"a variant cannot have a section [{SECTION}]; put it at the top level of the file")
    base = {k: v for k, v in tables.items() if k != VARIANT}
    return [_scaled(merge_tables(base, variant), scale) for variant in each]


def scales(tables: Mapping[str, Any]) -> list[str]:
    """Return the names of the scales of a file."""
    found = dict.fromkeys(tables.get(SCALE, {}))
    for variant in tables.get(VARIANT, ()):
        found |= dict.fromkeys(variant.get(SCALE, {}))
    return list(found)


def default_scale(tables: Mapping[str, Any]) -> str:
    """Return the scale that is used if none is named; empty if the file does not have it."""
    return USUAL if USUAL in scales(tables) else ""


def _scaled(tables: dict[str, Any], scale: str | None) -> dict[str, Any]:
    scales = tables.pop(SCALE, {})
    if not isinstance(scales, Mapping) or not all(isinstance(over, Mapping) for over in scales.values()):
        raise EquipoiseError(f"{SCALE} has the wrong form; it must be sections, such as [{SCALE}.small]")
    if scale is None:
        if USUAL not in scales:
            return tables
        scale = USUAL
    if scale not in scales:
        known = f"it has {', '.join(scales)}" if scales else "it has none"
        raise EquipoiseError(f"the file has no scale {scale!r}; {known}")
    return merge_tables(tables, scales[scale])


def run_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the flat settings that identify a run, without the seed."""
    return {k: v for k, v in flatten(experiment.tables()).items() if not k.startswith(_NOT_THE_RUN)}


def expand_sweep(
    tables: Mapping[str, Any],
    scale: str | None = None,
    sets: Sequence[str] = (),
    others: bool = True,
    folders: Sequence[Path] = (),
) -> tuple[list[SweepRun], Sweep]:
    """Return all runs of a file and its sweep settings, after checking every run.

    Args:
        tables: the contents of the file.
        scale: name of the scale, or None for the default.
        sets: settings in the form SECTION.KEY=VALUE, which override the file.
        others: whether to check the runs of the other scales too, so that their errors are found early.
        folders: where own code and relative paths are looked up, before the current folder.
    """
    with use_folders(folders):
        return _expand(tables, scale, sets, others, folders)


def _expand(
    tables: Mapping[str, Any], scale: str | None, sets: Sequence[str], others: bool, folders: Sequence[Path]
) -> tuple[list[SweepRun], Sweep]:
    tables = override(copy.deepcopy(dict(tables)), [item for item in sets if item.startswith(f"{SECTION}.")])
    rest = [item for item in sets if not item.startswith(f"{SECTION}.")]
    if not isinstance(tables.get(SECTION, {}), dict):
        raise EquipoiseError(f"{SECTION} = {shown(tables[SECTION])} is not allowed; it must be a section, [{SECTION}]")
    sweep = read(Sweep, tables.pop(SECTION, {}), SECTION)
    experiments = [
        Experiment.parse(each, folders=folders)
        for variant in variants(tables, scale)
        for each in grid(override(copy.deepcopy(variant), rest))
    ]
    for other in scales(tables) if others else ():
        for variant in variants(tables, other):
            for each in grid(variant):
                Experiment.parse(each, folders=folders)
    settings = [run_settings(experiment) for experiment in experiments]
    varied = [k for k in sorted({k for s in settings for k in s}) if len({json.dumps(s.get(k)) for s in settings}) > 1]
    # A setting that only one of the methods has, with one value, does not tell its runs apart.
    apart = tuple(k for k in varied if len({json.dumps(s[k]) for s in settings if k in s}) > 1)
    for key in sweep.tune:
        if key not in varied:
            raise EquipoiseError(f"sweep.tune names {key}, which has only one value; give it a list of values")
    _check_trials(sweep, {experiment.schedule.seed for experiment in experiments})
    if sweep.by == "unseen" and not all(own.get("data.unseen") for own in settings):
        raise EquipoiseError("sweep.by = 'unseen' needs unseen clients in every run; set data.unseen, such as 0.2")
    found: dict[tuple[str, int], SweepRun] = {}  # a run that is listed twice is done once
    for experiment, own in zip(experiments, settings, strict=True):
        words = [
            short_name(experiment.algorithm_name),
            *(short_name(str(own[k])) for k in varied if k in own and k != "algorithm.name"),
        ]
        label = "-".join("".join(c for c in word if c.isalnum() or c in ".+") for word in words)[:60]
        cell = SweepRun(experiment, digest_of(own), label, apart)
        found.setdefault((cell.identity, cell.seed), cell)
    return list(found.values()), sweep


def _check_trials(sweep: Sweep, seeds: Collection[int]) -> None:
    """Raise an error if the settings of trials have no use, or if trials would have a seed that is reported."""
    for name in ("tune_rounds", "tune_seed", "tune_honest"):
        if getattr(sweep, name) not in (None, False) and not sweep.tune:
            raise EquipoiseError(f"sweep.{name} needs sweep.tune, the settings that are tuned")
    if sweep.tune_seed in seeds:
        raise EquipoiseError(
            f"sweep.tune_seed = {sweep.tune_seed} is one of the seeds of the runs; name another, such as "
            f"{max(seeds) + 100}, so that the choice is independent of the scores that are reported"
        )


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return a digest of settings."""
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()


def _training(cell: SweepRun) -> str:
    """Return a digest of all settings that determine training; some runs share it with no other.

    A callback may stop a run. With noise on the gradients of samples, what an algorithm makes of a training is part of
    the budget that determines the noise.
    """
    privacy = cell.experiment.privacy
    if any(callback.affects_results for callback in cell.experiment.callbacks) or (privacy and privacy.of_samples):
        return f"{cell.identity} {cell.seed}"
    settings = cell.experiment.tables() | {"algorithm": cell.experiment.algorithm.training_settings()}
    flat = {k: v for k, v in flatten(settings).items() if k not in ("select", "targets")}
    return digest_of({k: v for k, v in flat.items() if k == "seed" or not k.startswith(_NOT_THE_RUN)})


def chains(every: Sequence[SweepRun]) -> list[list[SweepRun]]:
    """Group runs with the same training: the first of a group trains, and the others score its models."""
    found: dict[str, list[SweepRun]] = {}
    for cell in every:
        found.setdefault(_training(cell), []).append(cell)
    return list(found.values())
