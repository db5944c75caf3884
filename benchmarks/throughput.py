"""Measure training samples per second: Equipoise against a common simulator style and against the machine's ceiling.

    python benchmarks/throughput.py [--seconds 3] [--repeats 3] [--no-compile] [--device cuda] [--out FILE.json]

usual      one module and one DataLoader per client, torch.optim, one client after another, torch's default threads
ceiling    the same forward, backward and update steps on batches that are ready in memory, without a federation; the
           best of one worker per core (threads or processes) and all cores on each operator, each with two ways to
           hold parameters
equipoise  whole rounds of FedAvg in the simulator, without evaluation; "processes": as with --processes, one per core;
           "compiled": with engine.compile = true

Inputs are images: bytes divided by 255. The usual style and the ceiling keep them as float32 tensors, as their users
do; Equipoise finds that they are bytes, keeps those, and divides in every batch.

Every figure is the median over `repeats` turns, in each of which all contestants run one after another.
"""

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from equipoise.algorithms import ALGORITHMS
from equipoise.config.engine import Engine, Schedule
from equipoise.data.federation import Federation, RaggedIndices
from equipoise.distributed.ranks import current_ranks
from equipoise.engine.simulation import Simulation
from equipoise.models import MODELS
from equipoise.runs.local_processes import process_environment
from equipoise.storage.run_folder import RunFolder
from equipoise.torch_device import choose_device
from equipoise.training.task import Task

CLIENTS = 10
CASES = {
    "softmax-100": ("softmax", (1, 28, 28), 100, 600),
    "mlp-100": ("mlp", (1, 28, 28), 100, 600),
    "lenet-10": ("lenet", (3, 32, 32), 10, 1000),
    "lenet-64": ("lenet", (3, 32, 32), 64, 2000),
}
BARS = {"softmax": 10, "mlp": 3.0, "lenet-10": 2.0, "lenet-64": 1.5}
CORES = len(os.sched_getaffinity(0))


@functools.cache
def make_data(shape, samples, clients=CLIENTS):
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (clients * samples, *shape), generator=rng) / 255
    y = torch.randint(0, 10, (clients * samples,), generator=rng)
    return x, y


def build(name, shape):
    torch.manual_seed(0)  # processes of a run check that they begin with the same weights
    return MODELS[name]().build(shape, 10)


def for_seconds(seconds, work, together=lambda: None):
    """Call `work`, which returns the number of its samples, until the time is over; return samples per second."""
    work()
    together()  # parallel workers must start together, or each would run alone for a while
    samples, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        samples += work()
    return samples / (time.perf_counter() - began)


def usual(name, shape, batch, samples, seconds, threads=CORES):
    torch.set_num_threads(threads)
    x, y = make_data(shape, samples)
    modules = [build(name, shape) for _ in range(CLIENTS)]
    loaders = [
        DataLoader(TensorDataset(xs, ys), batch_size=batch, shuffle=True)
        for xs, ys in zip(x.split(samples), y.split(samples), strict=True)
    ]

    def one_round():
        for module, loader in zip(modules, loaders, strict=True):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            for xb, yb in loader:
                optimizer.zero_grad()
                F.cross_entropy(module(xb), yb).backward()
                optimizer.step()
        return CLIENTS * samples

    return for_seconds(seconds, one_round)


def ready_steps(name, shape, batch, samples, seconds, threads, views, together=lambda: None):
    """Do steps on batches that are ready in memory, in this thread; return samples per second."""
    torch.set_num_threads(threads)
    module = build(name, shape)
    x, y = make_data(shape, samples)
    if name == "lenet":
        module, x = module.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))  # of all clients
    parameters = list(module.parameters())
    if views:  # gradients accumulate in place, and there is one fused update
        vector = torch.cat([p.detach().flatten() for p in parameters])
        gradient, offset = torch.zeros_like(vector), 0
        for p in parameters:
            p.data = vector[offset : offset + p.numel()].view(p.shape)
            p.grad = gradient[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()

    position, at_once = 0, max(1, samples // batch)

    def some_batches():
        nonlocal position
        count = 0
        for xb, yb in batches[position : position + at_once]:
            count += len(yb)
            loss = F.cross_entropy(module(xb), yb)
            if views:
                gradient.zero_()
                loss.backward()
                vector.add_(gradient, alpha=-0.01)
            else:
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-0.01)
        position = (position + at_once) % len(batches)
        return count

    return for_seconds(seconds, some_batches, together)


_barrier = None


def remember(barrier):
    """Store, in each process of the pool, the barrier at which its workers wait for each other."""
    global _barrier
    _barrier = barrier


def ready_steps_together(*case):
    return ready_steps(*case, together=_barrier.wait)


def ready_steps_in_processes(pool, *case):
    return sum(pool.starmap(ready_steps_together, [case] * CORES, chunksize=1))


def ready_steps_in_threads(*case):
    barrier = threading.Barrier(CORES)
    with ThreadPoolExecutor(CORES) as pool:
        return sum(pool.map(lambda _: ready_steps(*case, together=barrier.wait), range(CORES)))


def ceiling(pool, name, shape, batch, samples, seconds):
    ways = {}
    for views in (False, True):
        held = "views" if views else "separate"
        ways[f"threads, {held}"] = ready_steps_in_threads(name, shape, batch, samples, seconds, 1, views)
        ways[f"processes, {held}"] = ready_steps_in_processes(pool, name, shape, batch, samples, seconds, 1, views)
        ways[f"all cores an operator, {held}"] = ready_steps(name, shape, batch, samples, seconds, CORES, views)
    return ways


def federation(shape, samples, clients=CLIENTS, held_out=0):
    x, y = make_data(shape, samples, clients)
    indices = [np.arange(i * samples, (i + 1) * samples) for i in range(clients)]
    train, test = [i[: samples - held_out] for i in indices], [i[samples - held_out :] for i in indices]
    names = tuple(f"client-{i:03d}" for i in range(clients))
    none = RaggedIndices([np.empty(0, np.int64)] * clients)
    return Federation(x, y, names, RaggedIndices(train), none, RaggedIndices(test), classes=10)


class Ours:
    """A federation whose rounds can be run one by one."""

    device = "cpu"

    def __init__(self, name, shape, batch, samples, compiled=False, ranks=None, folder=None):
        fed = federation(shape, samples)
        task = Task(build(name, shape), fed.sample(), device=choose_device(self.device))
        algorithm = ALGORITHMS["fedavg"](lr=0.01, batch=batch)
        never = 10**9
        schedule = Schedule(rounds=never, evaluate_every=never, checkpoint_every=never)
        began = time.perf_counter()
        engine = Engine(compile=compiled)
        self.run = Simulation(task, fed, algorithm, schedule, engine, folder, ranks=ranks)
        self.run.advance()
        self.first_round, self.mode = time.perf_counter() - began, self.run.mode

    def __call__(self, seconds):
        torch.set_num_threads(1)  # as a run does, which other contestants changed

        def one_round():
            before = self.run.counters.gradient_samples
            self.run.advance()
            return self.run.counters.gradient_samples - before

        return for_seconds(seconds, one_round)

    def close(self):
        self.run.close()


class OursInProcesses:
    """The same in one process per core; they wait for commands between the turns."""

    def __init__(self, *case, compiled=False):
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(CORES)]
        self.processes = [
            context.Process(target=one_of_several, args=(rank, pipes[rank][1], self.folder.name, case, compiled))
            for rank in range(CORES)
        ]
        for process in self.processes:
            process.start()
        self.commands = [pipe[0] for pipe in pipes]
        (self.mode, self.first_round), *_ = self._answers()

    def __call__(self, seconds):
        for command in self.commands:
            command.send(seconds)
        speed, *_ = self._answers()
        return speed

    def _answers(self):
        return [command.recv() for command in self.commands]

    def close(self):
        for command in self.commands:
            command.send(None)
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def one_of_several(rank, pipe, folder, case, compiled):
    """Be one of the processes of a run; every round they agree on whether time is over."""
    os.environ |= process_environment(rank, CORES, Path(folder))
    ranks = current_ranks()
    ours = Ours(*case, compiled=compiled, ranks=ranks, folder=RunFolder(Path(folder)))
    pipe.send((ours.mode, ours.first_round))
    while (seconds := pipe.recv()) is not None:
        ranks.barrier()
        before, began = ours.run.counters.gradient_samples, time.perf_counter()
        while ranks.gather_json(time.perf_counter() - began < seconds)[0]:
            ours.run.advance()
        pipe.send((ours.run.counters.gradient_samples - before) / (time.perf_counter() - began))
    ours.close()
    ranks.close()


def contestants(case, compiled):
    """Return ours: as a user gets it, and with what helps models of this kind."""
    name, *rest = CASES[case]
    ours = {case: Ours(name, *rest)}
    if compiled and name == "softmax":  # larger matrix products gain nothing from compilation
        ours[f"{case}, compiled"] = Ours(name, *rest, compiled=True)
    if name == "lenet":  # its operators are so small that threads of one process wait for the interpreter
        ours[f"{case}, processes"] = OursInProcesses(name, *rest)
        if compiled:
            ours[f"{case}, compiled"] = Ours(name, *rest, compiled=True)
            ours[f"{case}, processes, compiled"] = OursInProcesses(name, *rest, compiled=True)
    return ours


def bar(case):
    """Return the ratio to the usual style that a case must reach."""
    return next((value for prefix, value in BARS.items() if case.startswith(prefix)), None)


def measure(case, pool, seconds, repeats, compiled):
    name, shape, batch, samples = CASES[case]
    ours = contestants(case, compiled)
    turns = {"usual": [], "usual, one thread": [], **{key: [] for key in ours}}
    ceilings = {}
    for _ in range(repeats):
        turns["usual"].append(usual(name, shape, batch, samples, seconds))
        turns["usual, one thread"].append(usual(name, shape, batch, samples, seconds, threads=1))
        for way, speed in ceiling(pool, name, shape, batch, samples, seconds).items():
            ceilings.setdefault(way, []).append(speed)
        for key, contestant in ours.items():
            turns[key].append(contestant(seconds))
    found = {key: statistics.median(values) for key, values in turns.items()}
    best = max(ceilings, key=lambda way: statistics.median(ceilings[way]))
    top = statistics.median(ceilings[best])
    rows = []
    for key, contestant in ours.items():
        rows.append(
            {
                "case": key,
                "mode": contestant.mode,
                "samples_per_second": round(found[key]),
                "usual": round(found["usual"]),
                "usual_one_thread": round(found["usual, one thread"]),
                "ceiling": round(top),
                "ceiling_way": best,
                "ratio_to_usual": round(found[key] / found["usual"], 2),
                "ratio_to_usual_one_thread": round(found[key] / found["usual, one thread"], 2),
                "share_of_ceiling": round(found[key] / top, 3),
                "bar": bar(key),
                "first_round_seconds": round(contestant.first_round, 2),
            }
        )
        contestant.close()
    return rows


def whole_rounds(rounds=5):
    """Time rounds of Ditto with lenet, 10 of 100 clients per round, all clients evaluated in every round."""
    shape, samples = (3, 32, 32), 60
    fed = federation(shape, samples, clients=100, held_out=20)
    task = Task(build("lenet", shape), fed.sample(), device=choose_device(Ours.device))
    schedule = Schedule(rounds=10**9, participation=10, checkpoint_every=10**9)
    run = Simulation(task, fed, ALGORITHMS["ditto"](lr=0.01, batch=10), schedule, Engine())
    run.advance()
    timings = []
    log = run.log
    run.log = lambda line, timing: (timings.append(timing), log(line, timing))
    for _ in range(rounds):
        run.advance()
    run.close()
    train, evaluate = (statistics.median(t[k] for t in timings) for k in ("train", "evaluate"))
    return {
        "what": "ditto, lenet, 10 of 100 clients of 40 samples, every client's models evaluated every round",
        "round_seconds": round(train + evaluate, 4),
        "train_seconds": round(train, 4),
        "evaluate_seconds": round(evaluate, 4),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one turn")
    parser.add_argument("--repeats", type=int, default=3, help="number of turns")
    parser.add_argument("--only", choices=list(CASES), action="append", help="measure only this case")
    parser.add_argument("--no-compile", action="store_true", help="do not measure compiled steps")
    parser.add_argument("--device", default="cpu", help="where Equipoise trains; the others train on the CPU")
    parser.add_argument("--out", help="also write the figures to this JSON file")
    options = parser.parse_args()
    Ours.device = options.device
    compiled = not options.no_compile and shutil.which("g++") is not None
    context = multiprocessing.get_context("spawn")
    with context.Pool(CORES, remember, (context.Barrier(CORES),)) as pool:
        rows = []
        for case in options.only or CASES:
            print(f"measuring {case} …", file=sys.stderr)
            rows += measure(case, pool, options.seconds, options.repeats, compiled)
    result = {"cores": CORES, "torch": torch.__version__, "throughput": rows, "whole_rounds": whole_rounds()}
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        with open(options.out, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
