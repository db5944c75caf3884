"""Estimate how long the files of `equipoise reproduce` take.

    python benchmarks/experiments.py --data DIR

Writes experiments/times.json: for every file, every data set that it is used with and every scale, the number of runs
and the mean seconds of one run on one core. Runs that differ only in seed, partition, attack, reducer, noise or
strengths are assumed to take the same time. One run of each kind does a few rounds, and a later round is timed. If that
would take long, a single client with few samples is timed, and the time per sample is used for all scales. A scored
sample counts as a third of a sample in a backward pass.
The rest is arithmetic, so the figures are estimates: they tell an hour from a week, not minutes. Figures that are in
the file already are kept; --again measures them again.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.config.experiment import Experiment
from equipoise.data.federation import Federation
from equipoise.engine.assembly import experiment_task
from equipoise.engine.simulation import Simulation
from equipoise.executors.build import execution_mode
from equipoise.reproduction.exhibits import SCALES, TIMES, Exhibit, ExhibitPart, exhibits, own, timed
from equipoise.runs.sweep import SweepRun, expand_sweep
from equipoise.storage.atomic_files import write_json
from equipoise.storage.run_folder import flatten, read_toml

MOST, CLIENTS = (28, 280, 2800), 1
"""Samples per client, and clients, of a trial; the larger numbers are used if a trial is very short."""
ENOUGH = 0.5
"""Seconds of a trial's round above which its fixed costs hardly count."""
QUICK = 3.0
"""Seconds of a round up to which the round itself is timed."""
START = 2.0
"""Seconds before the first round of a run, with decoded data in the cache."""
_ALIKE = (
    *("seed", "rounds", "participation", "evaluate_every", "checkpoint_every"),
    *("data.partition", "attack", "reducer", "privacy", "targets"),
    *("algorithm.lam", "algorithm.rho", "algorithm.lr", "algorithm.server_lr", "algorithm.global_lr"),
)
_SIZES = ("data.clients", "data.most")


def kind(experiment: Experiment, apart: Sequence[str] = _ALIKE) -> str:
    settings = flatten(experiment.tables())
    return json.dumps({k: v for k, v in settings.items() if not k.startswith(tuple(apart))}, sort_keys=True)


_known: dict[str, tuple[float, float]] = {}


def later_round(experiment: Experiment, name: str, federation: Federation) -> tuple[float, float]:
    """Return the seconds of a later round, and of one sample in its backward pass, measured once for each name."""
    if name not in _known:
        _known[name] = _timed(experiment, federation)
    return _known[name]


def _timed(experiment: Experiment, federation: Federation) -> tuple[float, float]:
    endless = {"rounds": 10**6, "evaluate_every": 10**6, "checkpoint_every": 10**6}
    schedule = experiment.schedule.model_copy(update=endless)
    engine = experiment.engine.model_copy(update={"workers": 1})
    alone = replace(experiment, attack=None, privacy=None)
    settings = (experiment.algorithm, schedule, engine)
    run = Simulation(
        experiment_task(alone, federation),
        federation,
        *settings,
        None,
        None,
        alone.uploads,
        alone.devices,
    )
    rounds: list[float] = []
    samples = 0
    while len(rounds) < 3 and sum(rounds) < QUICK:  # the first round is slower; if it is long, not by much
        spent, before = run.counters.seconds, run.counters.gradient_samples
        run.advance()
        rounds.append(run.counters.seconds - spent)
        samples = run.counters.gradient_samples - before
    run.close()
    return min(rounds), min(rounds) / samples if samples else 0.0


def seconds(cell: SweepRun, data: Path) -> float:
    experiment, schedule = cell.experiment, cell.experiment.schedule
    assert experiment.data is not None
    federation = experiment.federation(data)
    clients = len(federation) - len(federation.unseen)
    trained = float(np.mean(federation.train.lengths))
    # A trial with few samples of few clients, because a whole round may take long.
    for most in MOST:
        most = min(most, experiment.data.dealing.most or most)
        section = replace(experiment.data, dealing=experiment.data.dealing.model_copy(update={"most": most}))
        small = replace(experiment, data=section, schedule=schedule.model_copy(update={"participation": CLIENTS}))
        tried = small.federation(data)
        spent, backward = later_round(small, f"{most} {kind(experiment, (*_ALIKE, *_SIZES))}", tried)
        if spent > ENOUGH:
            break
    round = spent / CLIENTS / float(np.mean(tried.train.lengths)) * schedule.cohort(clients) * trained
    # Few samples say little about the speed of the stacked mode.
    stacked = execution_mode(experiment.engine, experiment_task(experiment, tried)) == "stacked"
    if round < (20 * QUICK if stacked else QUICK):
        round, backward = later_round(experiment, kind(experiment) + str(schedule.cohort(clients)), federation)
    scored = (federation.test.lengths.sum() + federation.validation.lengths.sum()) / 3
    tuned = getattr(experiment.algorithm, "finetune_epochs", 0) * trained * clients
    evaluations = -(-schedule.rounds // schedule.evaluate_every)
    return float(START + schedule.rounds * round + evaluations * (scored + tuned) * backward)


def alike(cell: SweepRun) -> str:
    """Return a key that is equal for runs of a file that are assumed to take the same time."""
    schedule = cell.experiment.schedule
    return kind(cell.experiment) + json.dumps([schedule.rounds, schedule.participation, schedule.evaluate_every])


def measured(exhibit: Exhibit, part: ExhibitPart, file: str, scale: str, data: Path) -> dict[str, Any]:
    every, _ = expand_sweep(read_toml(exhibit.folder / f"{file}.toml"), scale, part.set, folders=[exhibit.folder])
    known: dict[str, float] = {}
    for cell in every:
        if alike(cell) not in known:
            known[alike(cell)] = seconds(cell, data)
    return {"runs": len(every), "seconds": round(sum(known[alike(c)] for c in every) / len(every), 1)}


def main(given: argparse.Namespace, wanted: Sequence[Exhibit]) -> None:
    path = own() / TIMES
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for exhibit in wanted:
        for part in exhibit.parts:
            for file in part.files:
                name = timed(exhibit.paper, file, part)
                for scale in SCALES:
                    if scale in found.get(name, {}) and not given.again:
                        continue
                    began = time.perf_counter()
                    try:
                        entry = measured(exhibit, part, file, scale, given.data)
                    except Exception as error:  # such as missing data; the other files are still measured
                        print(f"{name} {scale}: {error}", flush=True)
                        continue
                    found.setdefault(name, {})[scale] = entry
                    write_json(path, found)
                    print(f"{name} {scale}: {entry} ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of data sets")
    parser.add_argument("--again", action="store_true", help="measure again what was measured before")
    parser.add_argument("--only", help="measure only exhibits whose name contains this text")
    options = parser.parse_args()
    main(options, [e for e in exhibits(own()).values() if not options.only or options.only in e.id])
