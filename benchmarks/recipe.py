"""Measure what a training recipe costs: runs with a schedule, weight decay or mixed precision beside plain ones.

    python benchmarks/recipe.py [--rounds 30] [--turns 5] [--out FILE.json]

Every recipe is run in turns with the plain one in one process, with one thread. A figure is a ratio of processor
seconds of whole runs, tracing included: the median over the turns, each against the plain run of the same turn.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from torch import nn

import equipoise as eq

CLIENTS, SAMPLES = 20, 200
RECIPES = {
    "cosine schedule": ({"schedule": "cosine"}, {}),
    "step schedule, warm-up": ({"schedule": {"kind": "step", "every": 5, "warmup": 3}}, {}),
    "weight decay": ({"weight_decay": 1e-3}, {}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
}


def module(hidden):
    torch.manual_seed(0)
    if not hidden:
        return nn.Sequential(nn.Linear(784, 10))
    return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def seconds(model, rounds, mode, recipe, options):
    began = time.process_time()
    algorithm = eq.FedAvg(lr=0.05, batch=20, **recipe)
    settings = {"rounds": rounds, "evaluate_every": rounds, "mode": mode, "workers": 1, **options}
    eq.train(model, DATA, algorithm, head=None, **settings)
    return time.process_time() - began


rng = np.random.default_rng(0)
DATA = eq.from_clients(
    [(rng.random((SAMPLES, 784), dtype=np.float32), rng.integers(0, 10, SAMPLES)) for _ in range(CLIENTS)]
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of a run")
    parser.add_argument("--turns", type=int, default=5, help="runs of each recipe")
    parser.add_argument("--out", help="also write the figures to this JSON file")
    options = parser.parse_args()
    rows = []
    for name, hidden, mode in (("softmax", 0, "stacked"), ("mlp", 64, "stacked"), ("mlp", 64, "threads")):
        model = module(hidden)
        ratios = {recipe: [] for recipe in RECIPES}
        seconds(model, 2, mode, {}, {})  # the first run in a process is slower
        for _ in range(options.turns):
            plain = seconds(model, options.rounds, mode, {}, {})
            for recipe, (settings, engine) in RECIPES.items():
                ratios[recipe].append(seconds(model, options.rounds, mode, settings, engine) / plain)
        for recipe, found in ratios.items():
            row = {"model": name, "mode": mode, "recipe": recipe, "ratio": round(statistics.median(found), 3)}
            row |= {"least": round(min(found), 3), "most": round(max(found), 3)}
            print(
                f"{name:8} {mode:8} {recipe:24} {row['ratio']:.2f} of plain ({row['least']:.2f} to {row['most']:.2f})"
            )
            rows.append(row)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
