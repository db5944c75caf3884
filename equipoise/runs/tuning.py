"""Tuning of a sweep: trials, the choice of the best values on validation samples, and the runs that use them.

Without more settings, the trials are the runs with the first seed; where a variant lacks it, those with the first seed
that it has. With `sweep.tune_seed` and `sweep.tune_rounds` they are runs of their own, so that the seeds that are
reported have no part in the choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.runs.sweep import Sweep, SweepRun, digest_of, run_settings
from equipoise.runs.sweep_results import SweepResults
from equipoise.storage.run_index import higher_is_better
from equipoise.storage.sweep_choices import record_choices


def group(cell: SweepRun, tune: Sequence[str]) -> str:
    """Return a digest of all settings except the seed and the tuned ones: the best run of each group is chosen.

    Args:
        cell: the run.
        tune: the settings, or whole sections, such as "attack".
    """
    sections = tuple(f"{name}." for name in tune)
    settings = run_settings(cell.experiment).items()
    return digest_of({k: v for k, v in settings if k not in tune and not k.startswith(sections)})


def trial_of(cell: SweepRun, sweep: Sweep) -> SweepRun:
    """Return the trial that stands for a run when values are chosen; it may be the run itself."""
    schedule = cell.experiment.schedule
    rounds = schedule.rounds if sweep.tune_rounds is None else min(sweep.tune_rounds, schedule.rounds)
    seed = schedule.seed if sweep.tune_seed is None else sweep.tune_seed
    trial = replace(cell.experiment, schedule=schedule.model_copy(update={"rounds": rounds, "seed": seed}))
    if sweep.tune_honest:
        trial = replace(trial, attack_name="", attack=None)
    if trial == cell.experiment:
        return cell
    return SweepRun.of(trial, f"trial-{cell.label}", cell.varied)


@dataclass(frozen=True)
class Choice:
    """The values that were chosen for one group of runs."""

    group: str
    identity: str
    "that of the chosen runs"
    settings: dict[str, Any]
    "settings that tell the group from others of the sweep"
    values: dict[str, Any]
    "the chosen values"
    grid: dict[str, list[Any]]
    "the values that were tried"
    score: float | None
    "of the chosen trial on validation samples; None if all trials failed or diverged"

    @property
    def at_end(self) -> list[str]:
        """Return the tuned settings whose chosen value is the smallest or largest number that was tried."""
        return [
            key
            for key, value in self.values.items()
            if len(tried := [v for v in self.grid[key] if isinstance(v, (int, float)) and not isinstance(v, bool)]) > 1
            and value in (min(tried), max(tried))
        ]

    def sentence(self) -> str:
        """Return the choice in words, without a full stop."""
        chosen = ", ".join(f"{_short(k)} {v} of {', '.join(map(str, self.grid[k]))}" for k, v in self.values.items())
        of = " ".join(str(v) if k.endswith("name") else f"{_short(k)}={v}" for k, v in self.settings.items())
        ends = "".join(f"; {_short(key)} {self.values[key]} is at the end of its grid" for key in self.at_end)
        failed = "; all trials failed or diverged" if self.score is None else ""
        return (f"{of}: " if of else "") + chosen + ends + failed

    def as_json(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        return {
            "settings": self.settings,
            "values": self.values,
            "grid": self.grid,
            "at_end": self.at_end,
            "validation": self.score,
        }


def _short(key: str) -> str:
    return key.removeprefix("algorithm.")


def _candidates(every: Sequence[SweepRun], sweep: Sweep, first: int | None) -> dict[str, tuple[SweepRun, SweepRun]]:
    """Return, by identity, one run of each combination and its trial."""
    runs: dict[str, dict[int, SweepRun]] = {}
    for cell in every:
        runs.setdefault(cell.identity, {}).setdefault(cell.seed, cell)
    if sweep.tune_seed is not None:
        of_trials = {identity: next(iter(seeds)) for identity, seeds in runs.items()}
    else:
        of_trials = _first_seeds(runs, sweep, every[0].seed if first is None else first)
    chosen = {identity: runs[identity][seed] for identity, seed in of_trials.items()}
    return {identity: (cell, trial_of(cell, sweep)) for identity, cell in chosen.items()}


def _first_seeds(runs: Mapping[str, Mapping[int, SweepRun]], sweep: Sweep, first: int) -> dict[str, int]:
    """Return the seed of the trial of each combination: the first that all combinations of its group have."""
    if all(first in seeds for seeds in runs.values()):
        return dict.fromkeys(runs, first)
    groups: dict[str, list[str]] = {}
    for identity, seeds in runs.items():
        groups.setdefault(group(next(iter(seeds.values())), sweep.tune), []).append(identity)
    found: dict[str, int] = {}
    for identities in groups.values():
        own = [first, *runs[identities[0]]]
        seed = next((seed for seed in own if all(seed in runs[identity] for identity in identities)), None)
        if seed is None:
            raise EquipoiseError(
                f"the values of {', '.join(sweep.tune)} have no seed in common to choose by; give all values the same "
                "seeds, or set sweep.tune_seed"
            )
        found |= dict.fromkeys(identities, seed)
    return {identity: found[identity] for identity in runs}


def trials_of(every: Sequence[SweepRun], sweep: Sweep, first: int | None = None) -> list[SweepRun]:
    """Return the trials of a sweep or of a part of it, in the order of the sweep; none if nothing is tuned.

    Args:
        every: the runs.
        sweep: the settings that are tuned.
        first: the first seed of the whole sweep; by default that of the first run.
    """
    if not sweep.tune or not every:
        return []
    found = {(trial.identity, trial.seed): trial for _, trial in _candidates(every, sweep, first).values()}
    return list(found.values())


def find_choices(
    every: Sequence[SweepRun], sweep: Sweep, results: SweepResults, first: int | None = None
) -> list[Choice]:
    """Return the choice of each group; none until all trials are done.

    Args:
        every: all runs of the sweep, or of a part of it.
        sweep: the settings that are tuned.
        results: where the results of runs are.
        first: the first seed of the whole sweep; by default that of the first run.
    """
    trials = trials_of(every, sweep, first)
    if not all(results.done(trial) or results.failed(trial) for trial in trials):
        return []
    groups: dict[str, list[tuple[SweepRun, float, float | None]]] = {}
    for cell, trial in _candidates(every, sweep, first).values() if trials else ():
        groups.setdefault(group(cell, sweep.tune), []).append((cell, *_worth(trial, sweep.by, results)))
    return [_choice(name, found, sweep) for name, found in groups.items()]


def _choice(name: str, candidates: Sequence[tuple[SweepRun, float, float | None]], sweep: Sweep) -> Choice:
    best, _, score = max(candidates, key=lambda each: each[1])
    settings = [run_settings(cell.experiment) for cell, _, _ in candidates]
    chosen = run_settings(best.experiment)
    grid = {key: _sorted([own[key] for own in settings if key in own]) for key in sweep.tune if key in chosen}
    apart = {key: chosen[key] for key in best.varied if key in chosen and key not in sweep.tune}
    if "algorithm.name" not in apart:
        apart = {"algorithm.name": best.experiment.algorithm_name, **apart}
    return Choice(name, best.identity, apart, {key: chosen[key] for key in grid}, grid, score)


def _sorted(values: list[Any]) -> list[Any]:
    """Return the different values, numbers in order."""
    found = [value for i, value in enumerate(values) if value not in values[:i]]
    return sorted(found) if all(isinstance(value, (int, float)) for value in found) else found


def tuned(
    every: Sequence[SweepRun], sweep: Sweep, results: SweepResults, first: int | None = None
) -> tuple[list[SweepRun], list[SweepRun]]:
    """Return the trials, and the runs with the chosen values and all seeds.

    The second list is empty until all trials are done.

    Args:
        every: all runs of the sweep, or of a part of it.
        sweep: the settings that are tuned.
        results: where the results of runs are.
        first: the first seed of the whole sweep; by default that of the first run.
    """
    if not sweep.tune or not every:
        return [], list(every)
    chosen = {choice.identity for choice in find_choices(every, sweep, results, first)}
    return trials_of(every, sweep, first), [cell for cell in every if cell.identity in chosen]


def record_tuning(every: Sequence[SweepRun], sweep: Sweep, results: SweepResults, first: int | None = None) -> None:
    """Write what was chosen into the folder of all runs, once all trials are done.

    Args:
        every: all runs of the sweep, or of a part of it.
        sweep: the settings that are tuned.
        results: where the results of runs are.
        first: the first seed of the whole sweep; by default that of the first run.
    """
    trials, chosen = tuned(every, sweep, results, first)
    if not every or (trials and not chosen):
        return
    identities = {cell.identity for cell in chosen}
    folders = {cell.folder(results.out).name: cell.identity in identities for cell in every}
    only_trials = {trial.folder(results.out).name for trial in trials} - folders.keys()
    choices = {choice.group: choice.as_json() for choice in find_choices(every, sweep, results, first)}
    record_choices(results.out, sweep.tune, sweep.by, folders, sorted(only_trials), choices)


def _worth(cell: SweepRun, by: str, results: SweepResults) -> tuple[float, float | None]:
    """Return a number of which higher is better, and the score on validation samples; without one a run is worst."""
    if results.failed(cell):
        return -inf, None
    summary = results.summary(cell)
    of = summary.get("unseen", {}) if by == "unseen" else summary
    # A method without this kind of model is judged by one that it has.
    scores: dict[str, Any] = next((of[kind] for kind in (by, "personal", "global") if kind in of), {})
    name = f"validation_{summary['metric']}"
    if name not in scores:
        raise EquipoiseError(f"{results.path(cell)} has no score on validation samples to choose by; set data.split")
    if scores[name] is None:
        return -inf, None
    score = float(scores[name])
    return (score if higher_is_better(summary) else -score), score
