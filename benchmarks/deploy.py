"""Measure the seconds and bytes of a round over Flower, against the same round in the simulator.

    python benchmarks/deploy.py [--rounds 5] [--clients 4] [--out FILE.json]

Ditto trains an mlp of about 100,000 parameters in float32 on the digits that come with the package, once simulated and
once deployed as by `equipoise deploy local`: a SuperLink and one SuperNode per client on this machine, with TLS. A
proxy between each SuperNode and the SuperLink counts bytes; the times at which models pass show how long a client
worked on an order, and how long it waited for the next. All clients share the cores of this machine, so their processes
start more slowly than each would alone. The benchmark fails if the two runs end with different models or metrics.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np

from equipoise.callbacks.base import Callback
from equipoise.config.experiment import Experiment
from equipoise.engine.model_files import load_model
from equipoise.errors import EquipoiseError
from equipoise.flower.local_apps import ExperimentApp
from equipoise.flower.local_deployment import LocalDeployment
from equipoise.runs import launch
from equipoise.storage.run_folder import RunFolder

BULK = 8192  # bytes; only models come in pieces of this size
CLOSE = 1e-4
TURNS = 3
SETTINGS = {
    "data": {"name": "digits-by-writer"},
    "model": {"name": "mlp", "hidden": [128, 64]},
    "algorithm": {"name": "ditto", "lr": 0.1},
    "engine": {"mode": "threads", "precision": "float32"},
}

_IMPORT = """
import json, time
began = time.perf_counter()
import flwr.supernode.runtime.run_clientapp
flower = time.perf_counter()
import torch
torch = time.perf_counter()
import equipoise.flower
print(json.dumps([flower - began, torch - flower, time.perf_counter() - torch]))
"""


class Proxy:
    """Ports that forward everything to the SuperLink and count it, until the block ends."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.servers, self.connections = [], 0
        self.bytes = Counter()
        self.bulk = {}
        "times at which pieces of a model passed, and their direction, by node"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _close(self):
        for server in self.servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def open(self, node, address):
        """Open a port for this node, and return its address."""
        host, port = address.rsplit(":", 1)
        seen = self.bulk[node] = []

        async def relay(reader, writer):
            self.connections += 1
            with suppress(OSError, asyncio.CancelledError):
                try:
                    to_reader, to_writer = await asyncio.open_connection(host, int(port))
                    try:
                        up = self._pass(reader, to_writer, "up", seen)
                        await asyncio.gather(up, self._pass(to_reader, writer, "down", seen))
                    finally:
                        to_writer.close()
                finally:
                    writer.close()

        listening = asyncio.start_server(relay, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(listening, self.loop).result()
        self.servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _pass(self, reader, writer, direction, seen):
        while piece := await reader.read(1 << 16):
            self.bytes[direction] += len(piece)
            if len(piece) >= BULK:
                seen.append((time.perf_counter(), direction))
            writer.write(piece)
            await writer.drain()
        writer.write_eof()

    def gaps(self, first, then):
        """Return the seconds between the end of a model in one direction and the start of the next in the other."""
        pairs = [pair for seen in self.bulk.values() for pair in pairwise(seen)]
        return [b - a for (a, was), (b, now) in pairs if (was, now) == (first, then)]


class Through:
    """Processes whose SuperNodes reach the SuperLink through the proxy."""

    def __init__(self, processes, proxy):
        self.processes, self.proxy = processes, proxy

    def __getattr__(self, name):
        return getattr(self.processes, name)

    def start(self, name, command):
        command = list(command)
        if command[0] == "flower-supernode":
            at = command.index("--superlink") + 1
            command[at] = self.proxy.open(name, command[at])
        self.processes.start(name, command)


class Counted(LocalDeployment):
    """A deployment through the proxy, which finally asks Flower how long the ClientApps were at work."""

    def __init__(self, proxy, *args):
        super().__init__(*args)
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


def measure(rounds, clients, folder):
    data = folder / "data"  # empty, so that the excerpt that comes with the package is used
    tables = SETTINGS | {"rounds": rounds, "data": SETTINGS["data"] | {"clients": clients}}
    experiment = Experiment.parse(tables)
    simulated = launch.run(experiment, folder / "simulated", data)
    flower = experiment.deployed()
    with Proxy() as proxy:
        local = Counted(proxy, ExperimentApp(flower, flower.federation(data)), folder / "deployed", PrintedProgress())
        local.run(resume=False)
    deployed = RunFolder(folder / "deployed")
    summary = deployed.read_summary()

    wrong = differences(simulated.metrics[-1], deployed.read_metrics()[-1])
    if summary["refused"] or summary["left_out"]:
        wrong.append(f"refused: {summary['refused']}, left out: {summary['left_out']}")
    ours = simulated.global_model().state_dict()
    theirs = load_model(folder / "deployed" / "global.safetensors").state_dict()
    apart = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    if not apart <= CLOSE:
        wrong.append(f"global models differ by {apart:g}")

    seconds = {name: round_seconds(folder / name) for name in ("simulated", "deployed")}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "what": "ditto, mlp on digits-by-writer, float32, all clients in every round, evaluation after every round",
        "parameters": simulated.global_vector().numel(),
        "clients": clients,
        "rounds": rounds,
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in ("flwr", "torch")},
        "global_models_apart": apart,
        "seconds": {
            "simulated_round": median["simulated"],
            "deployed_round": median["deployed"],
            "ratio": median["deployed"] / median["simulated"],
            "difference": median["deployed"] - median["simulated"],
            "simulated_rounds": seconds["simulated"],
            "deployed_rounds": seconds["deployed"],
            "client_from_order_to_answer": statistics.median(proxy.gaps("down", "up")),
            "client_from_answer_to_order": statistics.median(proxy.gaps("up", "down")),
            # Each client gets one order to enrol, one per round to train, and one to score the last models.
            "client_app_an_order": local.app_seconds / (clients * (rounds + 2)),
            "imports": imports_in_turns(clients),
        },
        "bytes": {"connections": proxy.connections},
    }
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


def show(result):
    seconds, size = result["seconds"], result["bytes"]
    print(f"{result['parameters']:,} parameters, {result['clients']} clients, {result['cores']} cores")
    rows = {
        "one round, simulated": seconds["simulated_round"],
        "one round, deployed": seconds["deployed_round"],
        "  difference to simulated": seconds["difference"],
        "  client works on an order": seconds["client_from_order_to_answer"],
        "    its ClientApp runs, as Flower counts": seconds["client_app_an_order"],
        "  client waits for the next order": seconds["client_from_answer_to_order"],
        "imports of a ClientApp's process, alone": seconds["imports"]["alone"]["clock"],
        f"imports of {result['clients']} such processes at once": seconds["imports"]["all_clients_at_once"]["clock"],
        "  processor time of each": seconds["imports"]["all_clients_at_once"]["core"],
    }
    for name, value in rows.items():
        print(f"{name:<50}{value:>12.3f} s")
    print(f"{'ratio of deployed to simulated':<50}{seconds['ratio']:>12.0f}")
    names = list(size["up"])
    print("\n" + f"{'bytes':<6}" + "".join(f"{name:>19}" for name in names))
    for direction in ("up", "down"):
        cells = [size[direction][name] for name in names]
        print(f"{direction:<6}" + "".join(f"{c:>19,}" if isinstance(c, int) else f"{c:>19.4f}" for c in cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--clients", type=int, default=4, help="number of clients")
    parser.add_argument("--out", help="also write the figures to this JSON file")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also if a shell started this in the background
        signal.signal(number, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result, wrong = measure(options.rounds, options.clients, Path(folder))
    except KeyboardInterrupt:
        sys.exit("stopped; all processes have ended")
    except EquipoiseError as error:
        sys.exit(str(error))
    show(result)
    if wrong:
        sys.exit("\n".join(["the two runs do not agree:", *wrong]))
    if options.out:
        Path(options.out).write_text(json.dumps(rounded(result), indent=2) + "\n")


if __name__ == "__main__":
    main()
