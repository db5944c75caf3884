"""Measure many clients: rounds with 100 of 100,000 clients against rounds with 100 of 1,000.

    python benchmarks/scale.py [--clients 100000] [--rounds 40] [--out FILE.json]

The method is Ditto with the softmax model. Every client has a personal state (31 kB each, 3.1 GB for 100,000); all
states are kept in files, and few in memory. Rounds of the two federations take turns; a checkpoint every 10 rounds is
part of the time, evaluation is not. Peak memory is that of a separate process with the large federation only.
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

SAMPLES, COHORT, MEMORY_MB = 100, 100, 256


def federation(clients):
    """Return a federation whose clients draw from one pool, so that only the number of clients counts."""
    rng = np.random.default_rng(0)
    pool = 20_000
    x, y = torch.from_numpy(rng.random((pool, 784), dtype=np.float32)), torch.from_numpy(rng.integers(0, 10, pool))
    train = RaggedIndices(list(rng.integers(0, pool, (clients, SAMPLES))))
    none = RaggedIndices([np.empty(0, np.int64)] * clients)
    return Federation(x, y, tuple(f"client-{i:07d}" for i in range(clients)), train, none, none, classes=10)


def start(clients, folder):
    fed = federation(clients)
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
    for who in range(clients):
        run.store.put(who, State(v=task.w0.clone()))
    run.save_checkpoint()
    return run


def timed_round(run):
    began = time.perf_counter()
    run.advance()
    return time.perf_counter() - began


def memory_alone(clients, rounds, folder, answer):
    run = start(clients, Path(folder))
    for _ in range(rounds):
        run.advance()
    run.close()
    on_disk = sum(path.stat().st_size for path in run.folder.checkpoint.iterdir())
    answer.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, on_disk / 1e6))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000, help="clients of the large federation")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds of each federation")
    parser.add_argument("--out", help="also write the figures to this JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, large = start(1_000, Path(folder) / "small"), start(options.clients, Path(folder) / "large")
        times = {"small": [], "large": []}
        for _ in range(options.rounds):
            times["small"].append(timed_round(small))
            times["large"].append(timed_round(large))
        small.close()
        large.close()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        child = context.Process(target=memory_alone, args=(options.clients, 10, str(Path(folder) / "run"), answer))
        child.start()
        peak, on_disk = answer.get()
        child.join()
    mean = {name: statistics.mean(values) for name, values in times.items()}
    median = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "what": f"ditto, softmax, {COHORT} clients per round, {SAMPLES} samples each, checkpoint every 10 rounds",
        "clients": options.clients,
        "round_seconds_of_1000": round(mean["small"], 4),
        "round_seconds": round(mean["large"], 4),
        "ratio": round(mean["large"] / mean["small"], 3),
        "ratio_of_medians": round(median["large"] / median["small"], 3),
        "peak_memory_mb": round(peak, 1),
        "states_on_disk_mb": round(on_disk, 1),
        "memory_for_states_mb": MEMORY_MB,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
