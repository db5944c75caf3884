"""Measure Learn2pFed: epochs with messages against one autograd graph, and solves with and without a factorisation.

    python benchmarks/unrolled.py [--epochs 500] [--out FILE.json]

The task is the polynomial one: ten clients of 100 points, ten cells. *Engine* is a run with all its exchanges (forward
and backward, every message checked and counted); *in one place* is plain PyTorch with the data of all clients, one
solve per cell, and autograd over all cells. The two take turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from equipoise import load_data
from equipoise.algorithms import Learn2pFed
from equipoise.algorithms.learn2pfed.fits import Fit
from equipoise.config.engine import Engine, Schedule
from equipoise.engine.simulation import Simulation
from equipoise.models import MODELS
from equipoise.training.task import Task

CELLS, TURNS = 10, 5


def simulation() -> Simulation:
    federation = load_data("polynomial", clients=10)
    task = Task(MODELS["linear"]().build((4,), 1), federation.prepared(torch.float32, False).sample(), loss="squared")
    schedule = Schedule(rounds=10**9, evaluate_every=10**9, checkpoint_every=10**9)
    return Simulation(task, federation, Learn2pFed(cells=CELLS), schedule, Engine(mode="stacked", workers=1))


def in_one_place(run: Simulation) -> Callable[[], None]:
    pairs = [run.federation.gather(torch.from_numpy(run.federation.train[i])) for i in range(10)]
    x, y = (torch.stack([pair[k] for pair in pairs]) for k in (0, 1))
    gram, right, eye = x.mT @ x, x.mT @ y, torch.eye(4)
    leaves = [torch.full((10, 1, 1), 0.01).log().requires_grad_() for _ in range(5)]
    leaves.append(torch.full((10, 4, 1), 0.001).requires_grad_())
    optimizer = torch.optim.SGD(leaves, lr=0.01)

    def epoch() -> None:
        alpha = v = z = torch.zeros(10, 4, 1)
        w = torch.zeros(4, 1)
        rho, eta, gamma, theta, p = (leaf.exp() for leaf in leaves[:5])
        for _ in range(CELLS):
            alpha = alpha + theta * (z - v + w)
            v = torch.linalg.solve(gram + rho * eye, rho * (w + z + alpha) + right)
            z = eta / (leaves[5].relu() + eta) * (v - w - alpha)
            w = (p * gamma * (v - z - alpha)).sum(0) / (p * gamma).sum(0)
        optimizer.zero_grad()
        (x @ v - y).square().mean((1, 2)).sum().backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()

    return epoch


def seconds(work: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - began


def solves() -> dict[str, float]:
    """Time the solves of an epoch with one factorisation and without, for a layer with 401 inputs and 10 outputs.

    An epoch has ten cells forward, the same again backward, and their adjoints.
    """
    x = torch.randn(1000, 401)
    xx, xy, q = x.T @ x, x.T @ torch.randn(1000, 10), torch.randn(401, 10)
    rho, eye = torch.tensor(1.0), torch.eye(401)

    def once() -> None:
        fit = Fit.of(xx, xy)
        for _ in range(3 * CELLS):
            fit.solved(rho, q)

    def every_time() -> None:
        for _ in range(3 * CELLS):
            torch.linalg.solve(xx + rho * eye, rho * q + xy)

    turns = [(seconds(once, 3) / 3, seconds(every_time, 3) / 3) for _ in range(TURNS)]
    a, b = (statistics.median(column) for column in zip(*turns, strict=True))
    return {"factorised_once_ms": round(1e3 * a, 2), "a_solve_a_cell_ms": round(1e3 * b, 2), "ratio": round(b / a, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=500, help="number of epochs")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run = simulation()
    epoch, part = in_one_place(run), max(1, given.epochs // TURNS)
    run.advance()
    epoch()
    turns = [(seconds(run.advance, part) / part, seconds(epoch, part) / part) for _ in range(TURNS)]
    run.close()
    engine, plain = (statistics.median(column) for column in zip(*turns, strict=True))
    figures = {
        "epochs": given.epochs,
        "exchanges": given.epochs * 2 * CELLS,
        "engine_seconds": round(engine * given.epochs, 2),
        "in_one_place_seconds": round(plain * given.epochs, 2),
        "ratio": round(engine / plain, 2),
        "ms_an_exchange": round(1e3 * engine / (2 * CELLS), 3),
        "solves": solves(),
    }
    print(json.dumps(figures, indent=2))
    if given.out:
        given.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
