"""Measure the seconds and bytes of a round over Flower, against the same round in the simulator.

    python benchmarks/deploy.py [--rounds 3] [--clients 4] [--out FILE.json]

Ditto trains an mlp of about 100,000 parameters in float32 on the digits that come with the package, once simulated and
deployed as by `equipoise deploy local`: with cold clients (a new process for every message), with warm ones (a resident
process, the default), and with warm ones that look for messages more often (`--fast-poll`). Cold and warm ones take
turns, two each, so that a load that changes falls on both; the load average before each turn is printed. Each time
there are a SuperLink and one SuperNode per client on this machine, with TLS and node authentication. A proxy between
each SuperNode and the SuperLink counts bytes; the times at which models pass show how long a client worked on an order,
and how long it waited for the next. The memory is that of the processes that run clients' messages, the resident one
included. All clients share the cores of this machine, so their processes start more slowly than each would alone. Then
Learn2pFed, whose rounds have many exchanges, runs over warm clients.

The benchmark fails if a deployed run ends with other models or metrics than the simulated one, or misses a bar.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from deploy_probes import Memory, Proxy, Through

from equipoise.algorithms.capabilities import exchanges_of
from equipoise.callbacks.base import Callback
from equipoise.config.experiment import Experiment
from equipoise.engine.model_files import load_model
from equipoise.errors import EquipoiseError
from equipoise.flower.local_apps import ExperimentApp
from equipoise.flower.local_deployment import LocalDeployment
from equipoise.runs import launch
from equipoise.storage.run_folder import RunFolder

CLOSE = 1e-4
TURNS = 3  # of the imports
ORDER = ("cold", "warm", "cold", "warm", "fast_poll")  # of the deployments
MOST_TIME = 0.45  # of a cold round, for a warm one
WAYS = {"cold": {"warm": False}, "warm": {}, "fast_poll": {"fast_poll": True}}
SETTINGS = {
    "data": {"name": "digits-by-writer"},
    "model": {"name": "mlp", "hidden": [128, 64]},
    "algorithm": {"name": "ditto", "lr": 0.1},
    "engine": {"mode": "threads", "precision": "float32"},
}
EXCHANGES = {
    "rounds": 5,  # of 20 exchanges each
    "data": {"name": "polynomial", "setting": 1},
    "model": {"name": "linear"},
    "algorithm": {"name": "learn2pfed", "cells": 10},
    "engine": {"mode": "threads"},
}

_IMPORT = """
import json, time
began = time.perf_counter()
import flwr.supernode.runtime.run_clientapp
flower = time.perf_counter()
import torch
torch = time.perf_counter()
import equipoise.flower.apps
print(json.dumps([flower - began, torch - flower, time.perf_counter() - torch]))
"""


class Counted(LocalDeployment):
    """A deployment through the proxy, which finally asks Flower how long the ClientApps were at work."""

    def __init__(self, proxy, *args, **how):
        super().__init__(*args, **how)
        self.proxy = proxy
        self.app_seconds = None

    def _start(self, processes):
        super()._start(Through(processes, self.proxy))

    def _watch(self, processes, follow, run):
        super()._watch(processes, follow, run)
        answer = json.loads(processes.call(["flwr", "list", "deployment", "--run-id", run, "--format", "json"]))
        self.app_seconds = answer["runs"][0]["compute-time"]["clientapp-seconds"]


class PrintedProgress(Callback):
    def on_round_end(self, line):
        print(f"  round {line['round']}", file=sys.stderr, flush=True)

    def on_message(self, text):
        print(f"  {text}", file=sys.stderr, flush=True)


def imports(processes):
    """Return the seconds that this many new processes, started at once, need to import what a ClientApp imports.

    Returns:
        Wall-clock seconds until the last is done, processor seconds of each, and wall-clock seconds of each import.
    """
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    started = []
    try:
        for _ in range(processes):
            started.append(subprocess.Popen([sys.executable, "-c", _IMPORT], stdout=subprocess.PIPE))
        parts = [json.loads(process.communicate()[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    core = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / processes
    return {"clock": seconds, "core": core} | dict(zip(("flwr", "torch", "equipoise"), np.mean(parts, 0), strict=True))


def imports_in_turns(clients):
    turns = {"alone": [], "all_clients_at_once": []}
    for _ in range(TURNS):
        turns["alone"].append(imports(1))
        turns["all_clients_at_once"].append(imports(clients))
    return {
        name: {part: float(statistics.median(turn[part] for turn in found)) for part in found[0]}
        for name, found in turns.items()
    }


def round_seconds(folder):
    lines = map(json.loads, RunFolder(folder).timings.read_text().splitlines())
    return [line["train"] + line["evaluate"] for line in lines]


def differences(a, b, where=""):
    """Return what differs between two tables."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [x for k in a.keys() | b.keys() for x in differences(a.get(k), b.get(k), f"{where}.{k}")]
    same = np.isclose(a, b, rtol=CLOSE, atol=CLOSE) if isinstance(a, float) and isinstance(b, float) else a == b
    return [] if same else [f"{where.removeprefix('.')}: {a} simulated, {b} deployed"]


def rounded(value):
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def deployed(experiment, folder, data, **how):
    """Run a deployment; return it with its proxy and its memory."""
    print(f"{type(experiment.algorithm).__name__}, deployed {how}", file=sys.stderr, flush=True)
    flower = experiment.deployed()
    with Proxy() as proxy, Memory() as memory:
        local = Counted(proxy, ExperimentApp(flower, flower.federation(data)), folder, PrintedProgress(), **how)
        local.run(resume=False)
    return local, proxy, memory


def disagreement(simulated, folder):
    """Return how far the global models are apart, and everything in which a deployed run differs."""
    run = RunFolder(folder)
    summary = run.read_summary()
    wrong = differences(simulated.metrics[-1], run.read_metrics()[-1])
    if summary["refused"] or summary["left_out"]:
        wrong.append(f"refused: {summary['refused']}, left out: {summary['left_out']}")
    apart = 0.0
    if (folder / "global.safetensors").exists():
        ours = simulated.global_model().state_dict()
        theirs = load_model(folder / "global.safetensors").state_dict()
        apart = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    if not apart <= CLOSE:
        wrong.append(f"global models differ by {apart:g}")
    return apart, [f"{folder.name}: {what}" for what in wrong]


def measure_way(simulated, experiment, folder, data, **how):
    """Return the figures of one way to deploy, its proxy, and what is wrong."""
    load = os.getloadavg()[0]
    local, proxy, memory = deployed(experiment, folder, data, **how)
    apart, wrong = disagreement(simulated, folder)
    seconds, schedule = round_seconds(folder), experiment.schedule
    figures = {
        "round": statistics.median(seconds),
        "rounds": seconds,
        "client_from_order_to_answer": statistics.median(proxy.gaps("down", "up")),
        "client_from_answer_to_order": statistics.median(proxy.gaps("up", "down")),
        # Each client gets one order to enrol, one per round to train, and one to score the last models.
        "client_app_an_order": local.app_seconds / (len(local.local_app.names) * (schedule.rounds + 2)),
        "peak_mb": memory.peak,
        "global_models_apart": apart,
        "load_before": load,
    }
    return figures, proxy, wrong


def together(turns):
    """Return the figures of all turns of one way: medians, but the largest memory and difference."""
    seconds = [x for turn in turns for x in turn["rounds"]]
    figures = {name: statistics.median(turn[name] for turn in turns) for name in turns[0] if name != "rounds"}
    figures |= {name: max(turn[name] for turn in turns) for name in ("peak_mb", "global_models_apart")}
    figures |= {"round": statistics.median(seconds), "rounds": seconds}
    return figures | {"load_before": [turn["load_before"] for turn in turns]}


def measure(rounds, clients, folder):
    data = folder / "data"  # empty, so that the excerpt that comes with the package is used
    tables = SETTINGS | {"rounds": rounds, "data": SETTINGS["data"] | {"clients": clients}}
    experiment = Experiment.parse(tables)
    simulated = launch.run(experiment, folder / "simulated", data)
    turns, wrong = {name: [] for name in WAYS}, []
    for turn, name in enumerate(ORDER):
        out = folder / f"{turn}-{name}"
        figures, found, bad = measure_way(simulated, experiment, out, data, **WAYS[name])
        turns[name].append(figures)
        wrong += bad
        if name == "warm":
            proxy, summary = found, RunFolder(out).read_summary()
    ways = {name: together(found) for name, found in turns.items()}
    ratio = ways["warm"]["round"] / ways["cold"]["round"]
    if not ratio <= MOST_TIME:
        wrong.append(f"a warm round takes {ratio:.3f} of a cold one, more than {MOST_TIME}")
    if not ways["warm"]["peak_mb"] < ways["cold"]["peak_mb"]:
        wrong.append("warm clients take no less memory than cold ones")
    seconds = round_seconds(folder / "simulated")
    result = {
        "what": "ditto, mlp on digits-by-writer, float32, all clients in every round, evaluation after every round",
        "parameters": simulated.global_vector().numel(),
        "clients": clients,
        "rounds": rounds,
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in ("flwr", "torch")},
        "seconds": {"simulated_round": statistics.median(seconds), "simulated_rounds": seconds},
        "ways": ways,
        "to_cold": {name: ways[name]["round"] / ways["cold"]["round"] for name in ("warm", "fast_poll")},
        "memory_warm_to_cold": ways["warm"]["peak_mb"] / ways["cold"]["peak_mb"],
        "bytes": {"connections": proxy.connections},
    }
    result["seconds"]["imports"] = imports_in_turns(clients)
    for direction in ("up", "down"):
        counted, messages = summary[f"bytes_{direction}"], summary[f"message_bytes_{direction}"]
        wire = proxy.bytes[direction]
        result["bytes"][direction] = {
            "algorithm": counted,
            "messages": messages,
            "wire": wire,
            "wire_to_algorithm": wire / counted,
            "wire_to_messages": wire / messages,
        }
    return result, wrong


def measure_exchanges(clients, folder):
    """Measure Learn2pFed, whose cells exchange messages one after another."""
    experiment = Experiment.parse(EXCHANGES | {"data": EXCHANGES["data"] | {"clients": clients}})
    data = folder / "data"
    simulated = launch.run(experiment, folder / "learn2pfed-simulated", data)
    algorithm, rounds = experiment.algorithm, experiment.schedule.rounds
    result = {"cells": algorithm.cells, "rounds": rounds, "clients": clients}
    result["exchanges"] = exchanges_of(algorithm) * rounds
    wrong = []
    for name in ("warm", "fast_poll"):
        out = folder / f"learn2pfed-{name}"
        deployed(experiment, out, data, **WAYS[name])
        wrong += disagreement(simulated, out)[1]
        seconds = round_seconds(out)
        result[name] = {"round": statistics.median(seconds), "seconds_per_exchange": sum(seconds) / result["exchanges"]}
    return result, wrong


def loads(way):
    return " ".join(f"{load:.1f}" for load in way["load_before"])


def show(result):
    seconds, size, ways = result["seconds"], result["bytes"], result["ways"]
    print(f"{result['parameters']:,} parameters, {result['clients']} clients, {result['cores']} cores")
    print(f"{'one round, simulated':<45}{seconds['simulated_round']:>10.3f} s")
    print(f"{'imports of a process, alone':<45}{seconds['imports']['alone']['clock']:>10.3f} s")
    print(f"{'imports of all at once':<45}{seconds['imports']['all_clients_at_once']['clock']:>10.3f} s")
    print("\n" + f"{'':<45}" + "".join(f"{name:>12}" for name in ways))
    rows = {
        "one round, s": "round",
        "client works on an order, s": "client_from_order_to_answer",
        "its ClientApp runs, as Flower counts, s": "client_app_an_order",
        "client waits for the next order, s": "client_from_answer_to_order",
        "largest memory of all clients' processes, MB": "peak_mb",
    }
    for title, name in rows.items():
        print(f"{title:<45}" + "".join(f"{way[name]:>12.3f}" for way in ways.values()))
    print(f"{'load average before each turn':<45}" + "".join(f"{loads(way):>12}" for way in ways.values()))
    print(f"{'round to cold round':<45}{1.0:>12.3f}" + "".join(f"{x:>12.3f}" for x in result["to_cold"].values()))
    if "learn2pfed" in result:
        print("\n" + json.dumps(result["learn2pfed"]))
    names = list(size["up"])
    print("\n" + f"{'bytes':<6}" + "".join(f"{name:>19}" for name in names))
    for direction in ("up", "down"):
        cells = [size[direction][name] for name in names]
        print(f"{direction:<6}" + "".join(f"{c:>19,}" if isinstance(c, int) else f"{c:>19.4f}" for c in cells))


def write(result, out):
    if out:
        Path(out).write_text(json.dumps(rounded(result), indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--clients", type=int, default=4, help="number of clients")
    parser.add_argument("--out", help="also write the figures to this JSON file")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also if a shell started this in the background
        signal.signal(number, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result, wrong = measure(options.rounds, options.clients, Path(folder))
            write(result, options.out)  # what comes now takes minutes
            result["learn2pfed"], more = measure_exchanges(options.clients, Path(folder))
            wrong += more
    except KeyboardInterrupt:
        sys.exit("stopped; all processes have ended")
    except EquipoiseError as error:
        sys.exit(str(error))
    show(result)
    write(result, options.out)
    if wrong:
        sys.exit("\n".join(["not as it should be:", *wrong]))


if __name__ == "__main__":
    main()
