"""Measure many clients: rounds with 100 of a million clients against rounds with 100 of 1,000.

    python benchmarks/scale.py [--clients 1000000] [--states touched] [--rounds 40] [--out FILE.json]
    python benchmarks/scale.py --clients 100000 --states all

The method is Ditto with the softmax model, so that a client that took part has a personal state of 31 kB; states are in
files, and few in memory. With `--states touched`, both federations are as after 500 rounds: clients that took part have
a state, the others the initial one, as in any run. With `--states all`, every client has one (31 GB for a million).
Rounds of the two federations take turns; a checkpoint every 10 rounds is part of the time, evaluation is not. Peak
memory and the seconds to start are those of a separate process with the large federation only.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from equipoise.algorithms import ALGORITHMS
from equipoise.config.engine import Engine, Schedule
from equipoise.data.federation import Federation, RaggedIndices
from equipoise.engine.simulation import Simulation
from equipoise.models import MODELS
from equipoise.state import State
from equipoise.storage.run_folder import RunFolder
from equipoise.training.task import Task

SAMPLES, COHORT, MEMORY_MB, BEFORE = 100, 100, 256, 500


def federation(clients):
    """Return a federation whose clients draw from one pool, so that only the number of clients counts."""
    rng = np.random.default_rng(0)
    pool = 20_000
    x, y = torch.from_numpy(rng.random((pool, 784), dtype=np.float32)), torch.from_numpy(rng.integers(0, 10, pool))
    train = RaggedIndices(list(rng.integers(0, pool, (clients, SAMPLES))))
    none = RaggedIndices([np.empty(0, np.int64)] * clients)
    return Federation(x, y, tuple(f"client-{i:07d}" for i in range(clients)), train, none, none, classes=10)


def start(clients, folder, states):
    """Return a run as after some rounds, and the seconds that it took to make the federation and the run."""
    began = time.perf_counter()
    fed = federation(clients)
    loaded = time.perf_counter()
    task = Task(MODELS["softmax"]().build((784,), 10), fed.sample())
    never = 10**9
    folder.mkdir()
    run_folder = RunFolder(folder)
    schedule = Schedule(rounds=never, participation=COHORT, evaluate_every=never, checkpoint_every=10)
    run = Simulation(
        task,
        fed,
        ALGORITHMS["ditto"](lr=0.01, batch=20),
        schedule,
        Engine(memory_mb=MEMORY_MB),
        run_folder,
    )
    run.save_checkpoint()  # includes the digest of all data
    seconds = {"federation": loaded - began, "run": time.perf_counter() - loaded}
    who = range(clients)
    if states == "touched":
        run.done = BEFORE
        who = sorted({client for round in range(1, BEFORE + 1) for client in run.sample(round)})
    for client in who:
        run.store.put(client, State(v=task.w0.clone()))
    run.save_checkpoint()
    return run, seconds, len(who)


def timed_round(run):
    began = time.perf_counter()
    run.advance()
    return time.perf_counter() - began


def alone(clients, rounds, folder, states, answer):
    run, seconds, with_state = start(clients, Path(folder), states)
    for _ in range(rounds):
        run.advance()
    run.close()
    on_disk = sum(path.stat().st_size for path in run.folder.checkpoint.iterdir())
    answer.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, on_disk / 1e6, seconds, with_state))


def measured(clients, rounds, states):
    """Return the figures of a federation with this number of clients."""
    with tempfile.TemporaryDirectory() as folder:
        small, large = (start(n, Path(folder) / str(n), states)[0] for n in (1_000, clients))
        for run in (small, large):
            run.advance()  # the first round of a process traces the step and allocates memory
        times = {"small": [], "large": []}
        for _ in range(rounds):
            times["small"].append(timed_round(small))
            times["large"].append(timed_round(large))
        small.close()
        large.close()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        child = context.Process(target=alone, args=(clients, 10, str(Path(folder) / "run"), states, answer))
        child.start()
        peak, on_disk, seconds, with_state = answer.get()
        child.join()
    mean = {name: statistics.mean(values) for name, values in times.items()}
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "clients": clients,
        "clients_with_a_state": with_state,
        "round_seconds_of_1000": round(mean["small"], 4),
        "round_seconds": round(mean["large"], 4),
        "ratio": round(mean["large"] / mean["small"], 3),
        "ratio_of_medians": round(median["large"] / median["small"], 3),
        "seconds_to_make_the_federation": round(seconds["federation"], 2),
        "seconds_to_start_the_run": round(seconds["run"], 2),
        "peak_memory_mb": round(peak, 1),
        "states_on_disk_mb": round(on_disk, 1),
        "memory_for_states_mb": MEMORY_MB,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000, help="clients of the large federation")
    parser.add_argument("--states", choices=["touched", "all"], default="touched", help="which clients have a state")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds of each federation")
    parser.add_argument("--out", help="also write the figures to this JSON file, beside those of other settings")
    options = parser.parse_args()
    what = f"ditto, softmax, {COHORT} clients per round, {SAMPLES} samples each, checkpoint every 10 rounds"
    row = {"states": options.states, **measured(options.clients, options.rounds, options.states)}
    print(json.dumps(row, indent=2))
    if options.out:
        path = Path(options.out)
        before = json.loads(path.read_text())["scale"] if path.exists() else []
        kept = [other for other in before if (other["states"], other["clients"]) != (row["states"], row["clients"])]
        path.write_text(json.dumps({"what": what, "scale": [*kept, row]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
