"""Test the rule of engine.mode = "auto": time rounds of FedAvg in threads and stacked, in turns in one process.

    python benchmarks/modes.py [--rounds 8] [--out FILE.json]

"small" is the number that the rule compares with its limit: parameters times rows per sample. Figures are medians over
rounds, after a first round for warming up (and tracing).
"""

import argparse
import json
import statistics
import time
import warnings

import numpy as np
import torch

from equipoise.algorithms import ALGORITHMS
from equipoise.config.engine import Engine, Schedule
from equipoise.data.federation import from_clients
from equipoise.engine.simulation import Simulation
from equipoise.executors.build import build_executor
from equipoise.models import MODELS
from equipoise.settings import read
from equipoise.training.task import Task

CLIENTS, SAMPLES = 10, 64


def text(length, symbols, **settings):
    rng = np.random.default_rng(0)
    x = rng.integers(0, symbols, (CLIENTS, SAMPLES, length + 1), dtype=np.uint8)
    return [(c[:, :-1], c[:, 1:].astype(np.int64)) for c in x], ("transformer", settings, (length,), symbols), 16


def images(name, **settings):
    rng = np.random.default_rng(0)
    clients = [(rng.random((SAMPLES, 784), dtype=np.float32), rng.integers(0, 10, SAMPLES)) for _ in range(CLIENTS)]
    return clients, (name, settings, (784,), 10), 16


CASES = {
    "softmax": images("softmax"),
    "mlp": images("mlp"),
    "transformer, width 16, 8 characters, 1 layer": text(8, 80, width=16, layers=1),
    "transformer, width 16, 20 characters": text(20, 80, width=16),
    "transformer, width 64, 80 characters": text(80, 80, width=64),
}


def start(clients, model, batch, mode):
    name, settings, shape, outputs = model
    federation = from_clients([{"train": client} for client in clients])
    torch.manual_seed(0)
    module = read(MODELS[name], settings, "model").build(shape, outputs)
    task = Task(module, federation.sample())
    schedule = Schedule(rounds=10**9, evaluate_every=10**9, checkpoint_every=10**9)
    engine = Engine(mode=mode)
    return Simulation(task, federation, ALGORITHMS["fedavg"](lr=0.01, batch=batch), schedule, engine)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds of each mode")
    parser.add_argument("--out", help="also write the figures to this JSON file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*performance drop.*")
    rows = []
    for case, (clients, model, batch) in CASES.items():
        seconds = {"threads": [], "stacked": []}
        for turn in range(options.rounds + 1):
            for mode, taken in seconds.items():
                # Each mode sets torch's number of threads, so its executor is opened and closed in every turn.
                if turn == 0:
                    taken.append(start(clients, model, batch, mode))
                run = taken[0]
                run.executor.close()
                run.executor = build_executor(run.engine, run.task, run.federation, run.algorithm, run.schedule)
                run.advance()
                began = time.perf_counter()
                run.advance()
                if turn:
                    taken.append(time.perf_counter() - began)
                run.executor.close()
        task = seconds["threads"][0].task
        medians = {mode: statistics.median(taken[1:]) for mode, taken in seconds.items()}
        row = {
            "case": case,
            "small": task.space.size * task.rows,
            "auto": task.mode(),
            "stacked_to_threads": round(medians["stacked"] / medians["threads"], 2),
        }
        rows.append(row)
        print(row, flush=True)
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"modes": rows}, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
