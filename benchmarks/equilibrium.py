"""Measure the time and memory of training steps with equilibrium layers, against explicit networks and torchdeq.

    python benchmarks/equilibrium.py [--repeats 5] [--only steps,warm] [--out FILE.json]

Everything that is compared takes turns in one process with two threads, and figures are medians. Memory is the peak of
torch's allocator within a step, including parameters, gradients, activations and the solver's window; a second figure
is the growth of a separate process for each model. Parts that --only does not name stay in FILE.json as they were.
"""

import argparse
import copy
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torchdeq import get_deq
from torchdeq.solver import get_solver

from equipoise.config.engine import Engine, Schedule
from equipoise.config.experiment import Experiment
from equipoise.data.sources import data_folder
from equipoise.engine.assembly import experiment_task
from equipoise.engine.simulation import Simulation
from equipoise.equilibrium import SOLVERS, Equilibrium, layers, project_rows, solve
from equipoise.models import MODELS
from equipoise.models.blocks import EquilibriumBlock
from equipoise.training.memory_usage import peak_memory_mb

THREADS = 2
BATCH, SHAPE, CLASSES = 20, (3, 32, 32), 100  # CIFAR-100 in FeDEQ's configuration
TOL = 1e-3
MODELS_COMPARED = {
    "deq-resnet-s": ("deq-resnet-s", {}),
    "deq-resnet-m": ("deq-resnet-m", {}),
    "deq-resnet-s, implicit": ("deq-resnet-s", {"gradient": "implicit"}),
    "deq-resnet-m, implicit": ("deq-resnet-m", {"gradient": "implicit"}),
    "resnet-14": ("resnet-14", {}),
    "resnet-20": ("resnet-20", {}),
    "resnet-34": ("resnet-34", {}),
}
PEERS = {"deq-resnet-s": "resnet-14", "deq-resnet-m": "resnet-34"}


def peak_allocated_bytes(function: Callable[[], object]) -> int:
    """Return the peak bytes of torch's allocator during `function`, including temporary memory inside operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = function()
    del kept
    results = profiler.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def built(name, **settings):
    torch.manual_seed(0)
    module = MODELS[name](**settings).build(SHAPE, CLASSES).to(memory_format=torch.channels_last)
    for _, layer in layers(module):
        layer.quiet = True
    x = torch.randn(BATCH, *SHAPE).contiguous(memory_format=torch.channels_last)
    return module, x, torch.randint(0, CLASSES, (BATCH,))


def step(module, x, y):
    module.zero_grad()
    F.cross_entropy(module(x), y).backward()


def turns(functions, repeats, clock=time.perf_counter):
    """Return the median seconds of each function; they take turns, after one turn for warming up."""
    taken = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            began = clock()
            function()
            if turn:
                taken[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in taken.items()}


def grown(name, settings, results):
    """Put into `results` how many MB this process grows at most in two steps."""
    torch.set_num_threads(THREADS)
    step(*built("lenet"))  # the memory that torch takes only once
    before = peak_memory_mb()
    model = built(name, **settings)
    for _ in range(2):
        step(*model)
    results.put(peak_memory_mb() - before)


def in_a_process_of_its_own(name, settings):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=grown, args=(name, settings, results))
    process.start()
    figure = results.get()
    process.join()
    return figure


def steps(repeats):
    rows = {}
    models = {label: built(name, **settings) for label, (name, settings) in MODELS_COMPARED.items()}
    seconds = turns({label: lambda m=model: step(*m) for label, model in models.items()}, repeats)
    for label, (name, settings) in MODELS_COMPARED.items():
        module = models[label][0]
        found = [layer for _, layer in layers(module)]
        rows[label] = {
            "case": label,
            "parameters": sum(p.numel() for p in module.parameters()),
            "step_s": seconds[label],
            "peak_mb": peak_allocated_bytes(lambda n=name, s=settings: step(*built(n, **s))) / 2**20,
            "process_mb": in_a_process_of_its_own(name, settings),
        }
        if found:
            rows[label]["iterations"] = found[0].last.iterations.float().mean().item()
    for label, row in rows.items():
        peer = rows.get(PEERS.get(label.split(",")[0], ""))
        if peer:
            row["peer"] = peer["case"]
            for figure in ("step_s", "peak_mb", "process_mb"):
                row[f"{figure.split('_')[0]}_to_peer"] = row[figure] / peer[figure]
    return list(rows.values())


def flat(repeats):
    """Measure the peak memory of a step with exactly 5 and exactly 50 iterations."""
    rows = []
    for name in PEERS:
        for gradient in ("jacobian-free", "implicit"):
            peaks = {}
            for k in (5, 50):
                settings = {"tol": 0.0, "limit": k, "gradient": gradient}
                peaks[k] = peak_allocated_bytes(lambda s=settings, n=name: step(*built(n, **s))) / 2**20
            rows.append(
                {"case": f"{name}, {gradient}", "mb_5": peaks[5], "mb_50": peaks[50], "growth": peaks[50] / peaks[5]}
            )
    return rows


def block(channels, inner, layout=torch.channels_last):
    torch.manual_seed(0)
    f = EquilibriumBlock(channels, inner, "softplus").to(memory_format=layout)
    x = torch.randn(BATCH, channels, 16, 16).contiguous(memory_format=layout)
    return f, x


def residual(f, x, z):
    with torch.no_grad():
        value = f(z, x)
        return float(((value - z).flatten(1).norm(dim=1) / value.flatten(1).norm(dim=1)).max())


def solvers(repeats):
    """Time every solver to the same residual, on the block of deq-resnet-s."""
    rows = []
    f, x = block(64, 128)
    for tol in (1e-3, 1e-4):
        functions = {
            name: lambda cls=cls, t=tol: solve(f, torch.zeros_like(x), [x], solver=cls(), tol=t, limit=200)
            for name, cls in SOLVERS.items()
        }
        seconds = turns(functions, repeats)
        found = {name: function() for name, function in functions.items()}
        for name in SOLVERS:
            rows.append(
                {
                    "case": f"{name}, residual {tol:g}",
                    "iterations": found[name].iterations.double().mean().item(),
                    "solve_s": seconds[name],
                    "converged": bool(found[name].converged.all()),
                    "plain_to_this": seconds["plain"] / seconds[name],
                }
            )
    return rows


def gradient_of(f, x, out):
    v = torch.ones_like(out) / out.numel() ** 0.5
    return torch.cat([g.flatten() for g in torch.autograd.grad((out * v).sum(), list(f.parameters()))])


def against_torchdeq(repeats):
    """Compare with torchdeq on the same block, start, window and tolerance; theirs in two memory layouts."""
    rows = []
    for channels, inner in ((64, 128), (128, 256)):
        f, x = block(channels, inner)
        g, u = block(channels, inner, torch.contiguous_format)
        layer = Equilibrium(f, tol=TOL, limit=50)
        theirs = {"function": {"ift": True}, "hook": {"hook_ift": True}}
        settings = {
            "f_solver": "anderson",
            "b_solver": "anderson",
            "f_max_iter": 50,
            "b_max_iter": 50,
            "f_tol": TOL,
            "b_tol": TOL,
        }
        stop = {"f_stop_mode": "rel", "b_stop_mode": "rel"}
        deqs = {kind: get_deq(**settings, **stop, **given) for kind, given in theirs.items()}

        def ours_step(layer=layer, f=f, x=x):
            return gradient_of(f, x, layer(x))

        def their_step(f, x, deq):
            (out,), _ = deq(lambda z: f(z, x), torch.zeros_like(x), solver_kwargs={"m": 5})
            return gradient_of(f, x, out)

        solver = get_solver("anderson")

        def their_solve(f, x, solver=solver):
            with torch.no_grad():
                return solver(lambda z: f(z, x), torch.zeros_like(x), max_iter=50, tol=TOL, stop_mode="rel", m=5)[0]

        solves = {
            "ours": lambda f=f, x=x: solve(f, torch.zeros_like(x), [x], tol=TOL, limit=50).f,
            "torchdeq": lambda g=g, u=u: their_solve(g, u),
            "torchdeq, channels_last": lambda f=f, x=x: their_solve(f, x),
        }
        whole = {
            "ours": ours_step,
            "torchdeq": lambda g=g, u=u, d=deqs["function"]: their_step(g, u, d),
            "torchdeq, hook": lambda g=g, u=u, d=deqs["hook"]: their_step(g, u, d),
            "torchdeq, channels_last": lambda f=f, x=x, d=deqs["function"]: their_step(f, x, d),
            "torchdeq, hook, channels_last": lambda f=f, x=x, d=deqs["hook"]: their_step(f, x, d),
        }
        exact = gradient_of(f, x, Equilibrium(f, tol=1e-6, limit=200)(x))
        with torch.no_grad():
            most = int(solve(f, torch.zeros_like(x), [x], tol=TOL, limit=50).iterations.max())
            solves["f alone"] = lambda f=f, x=x, k=most: [f(x, x) for _ in range(k)]
            solve_s = turns(solves, repeats)
        step_s = turns(whole, repeats)
        for name in whole:
            row = {"case": f"{channels} channels: {name}", "step_s": step_s[name]}
            row["step_to_ours"] = step_s[name] / step_s["ours"]
            row["gradient_error"] = float((whole[name]() - exact).norm() / exact.norm())
            if name in solves:
                row["solve_to_ours"] = solve_s[name] / solve_s["ours"]
                row["residual"] = residual(f, x, solves[name]())
            rows.append(row)
        alone = solve_s["f alone"] / solve_s["ours"]
        rows.append({"case": f"{channels} channels: f alone, as often as we compute it", "solve_to_ours": alone})
    return rows


GRADIENTS = {
    "implicit": {"gradient": "implicit"},
    "jacobian-free": {"gradient": "jacobian-free"},
    "phantom, 5 steps": {"gradient": "phantom"},
    "phantom, 15 steps": {"gradient": "phantom", "phantom_steps": 15},
    "neumann, 5 steps": {"gradient": "neumann"},
    "neumann, 15 steps": {"gradient": "neumann", "phantom_steps": 15},
    "reversible": {"gradient": "reversible"},
    "reversible, damping 0.8": {"gradient": "reversible", "damping": 0.8},
    "unroll, 20 iterations": {"gradient": "unroll", "limit": 20},
}
THEIR_GRADIENTS = {
    "torchdeq, ift": {"ift": True},
    "torchdeq, grad=1": {"grad": 1},
    "torchdeq, grad=5, tau=0.5": {"grad": 5, "tau": 0.5},
    "torchdeq, grad=15, tau=0.5": {"grad": 15, "tau": 0.5},
}


CHANNELS, INNER = 32, 64  # of the block whose gradients are compared


def trained_block(training_steps):
    """Return a block, a linear classifier behind it, and a batch of noisy prototypes, after some training."""
    f, _ = block(CHANNELS, INNER)
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(10, CHANNELS, 16, 16, generator=generator)

    def batch():
        y = torch.randint(0, 10, (BATCH,), generator=generator)
        x = prototypes[y] + 3 * torch.randn(BATCH, CHANNELS, 16, 16, generator=generator)
        return x.contiguous(memory_format=torch.channels_last), y

    head = torch.nn.Linear(CHANNELS * 16 * 16, 10)
    layer = Equilibrium(f, tol=TOL, limit=50)
    layer.quiet = True
    optimizer = torch.optim.SGD([*f.parameters(), *head.parameters()], lr=0.02, momentum=0.9)
    for _ in range(training_steps):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(head(layer(x).flatten(1)), y).backward()
        optimizer.step()
    return f, head, *batch()


def parameter_gradient(f, head, y, out):
    loss = F.cross_entropy(head(out.flatten(1)), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(f.parameters()))])


def exact_gradient(f, head, x, y):
    """Return the gradient in float64, and how far that on two samples is from 150 unrolled iterations."""
    f, head, x = copy.deepcopy(f).double(), copy.deepcopy(head).double(), x.double()
    tight, unrolled = Equilibrium(f, tol=1e-10, limit=500), Equilibrium(f, gradient="unroll", limit=150, tol=1)
    two = [parameter_gradient(f, head, y[:2], layer(x[:2])) for layer in (tight, unrolled)]
    return parameter_gradient(f, head, y, tight(x)), float((two[0] - two[1]).norm() / two[0].norm())


def gradient_functions(f, head, x, y):
    """Return functions that compute the gradient for the parameters of f, ours and torchdeq's."""
    functions = {}
    for name, settings in GRADIENTS.items():
        layer = Equilibrium(f, **{"tol": TOL, "limit": 50, **settings})
        layer.quiet = True
        functions[name] = lambda layer=layer: parameter_gradient(f, head, y, layer(x))
    bounds = {
        "f_max_iter": 50,
        "b_max_iter": 50,
        "f_tol": TOL,
        "b_tol": TOL,
        "f_stop_mode": "rel",
        "b_stop_mode": "rel",
    }
    for name, settings in THEIR_GRADIENTS.items():
        deq = get_deq(f_solver="anderson", b_solver="anderson", **bounds, **settings)

        def theirs(deq=deq):
            (out,), _ = deq(lambda z: f(z, x), torch.zeros_like(x), solver_kwargs={"m": 5})
            return parameter_gradient(f, head, y, out)

        functions[name] = theirs
    return functions


def gradients(repeats):
    """Compare all gradients with the exact one, before and after training: float32, one thread, processor seconds."""
    rows = []
    torch.set_num_threads(1)
    for label, training_steps in (("at first", 0), ("after training", 60)):
        f, head, x, y = trained_block(training_steps)
        exact, check = exact_gradient(f, head, x, y)
        rows.append({"case": f"{label}: unroll, 150 iterations in float64, two samples", "error": check})
        functions = gradient_functions(f, head, x, y)
        seconds = turns(functions, repeats, time.process_time)
        for name, function in functions.items():
            found = function().double()
            row = {"case": f"{label}: {name}", "cosine": float(F.cosine_similarity(found, exact, dim=0))}
            row["norm_ratio"] = float(found.norm() / exact.norm())
            row["error"] = float((found - exact).norm() / exact.norm())
            row["step_s"] = seconds[name]
            row["peak_mb"] = peak_allocated_bytes(function) / 2**20
            rows.append(row)
    torch.set_num_threads(THREADS)
    return rows


def warm(repeats):
    """Measure warm starts in the local training of FeDEQ: 3 epochs of the head and 5 of the body, on digits by writer.

    The same for 5 epochs of both together (FedAvg), where every step moves the fixed points.
    """
    rows = []
    fedeq = {"name": "fedrep", "head_epochs": 3, "epochs": 5}
    fedavg = {"name": "fedavg", "epochs": 5}
    for model, work, clients, rounds in (
        ("deq-mlp", fedeq, 16, 2),
        ("deq-resnet-s", fedeq, 4, 2),
        ("deq-resnet-s", fedavg, 4, 2),
    ):
        cold = None
        for kind in ("off", "update", "client"):
            tables = {
                "data": {"name": "digits-by-writer"},
                "model": {"name": model, "warm_start": kind},
                "algorithm": {**work, "batch": 10, "lr": 0.01},
            }
            experiment = Experiment.parse(tables)
            federation = experiment.federation(data_folder(None))
            schedule = Schedule(rounds=10**6, participation=clients, evaluate_every=10**6, checkpoint_every=10**6)
            task = experiment_task(experiment, federation)
            run = Simulation(task, federation, experiment.algorithm, schedule, Engine(workers=THREADS))
            # The same clients in every round, so that the fixed points that they kept are used.
            run.sample = lambda round, n=clients: list(range(n))
            seconds = []
            for _ in range(rounds):
                began = time.perf_counter()
                run.advance()
                seconds.append(time.perf_counter() - began)
            run.close()
            row = {
                "case": f"{model}, {'head, then body' if work is fedeq else 'all together'}, {kind}",
                "iterations": run.counters.solves.forward.mean,
                "last_round_iterations": run.lines[-1]["solver_iterations"],
                "unconverged": run.counters.solves.forward.failed,
                "train_s": sum(seconds),
            }
            cold = cold or row
            row["iterations_to_cold"] = row["iterations"] / cold["iterations"]
            rows.append(row)
    return rows


def projection(repeats):
    """Time the projection of a matrix's rows onto the ball, and sorting them, with which other exact methods start."""
    torch.manual_seed(0)
    matrix = project_rows(torch.randn(512, 512), 0.95) + 1e-3 * torch.randn(512, 512)
    seconds = turns({"projection": lambda: project_rows(matrix, 0.95), "sort": lambda: matrix.sort(-1)}, 5 * repeats)
    return [{"case": "512 rows of 512", "ms": 1e3 * seconds["projection"], "sort_ms": 1e3 * seconds["sort"]}]


PARTS = {
    "steps": steps,
    "flat": flat,
    "solvers": solvers,
    "torchdeq": against_torchdeq,
    "gradients": gradients,
    "warm": warm,
    "projection": projection,
}


def tidy(row):
    return {k: float(f"{v:.4g}") if isinstance(v, (float, np.floating)) else v for k, v in row.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed turns")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure, separated by commas")
    parser.add_argument("--out", help="also write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    results = {}
    for part in options.only.split(","):
        print(
            f"{part}: {(PARTS[part].__doc__ or 'Measure a training step of each model.').splitlines()[0]}", flush=True
        )
        results[part] = [tidy(row) for row in PARTS[part](options.repeats)]
        for row in results[part]:
            print("  ", row, flush=True)
    if options.out:
        path = Path(options.out)
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
