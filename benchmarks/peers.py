"""Measure training samples per second of whole rounds of FedAvg: Equipoise against other simulators.

    pip install equipoise[peers]
    python benchmarks/peers.py [--seconds 2] [--turns 5] [--cases softmax-100 …] [--out FILE.json]

Contestants are Equipoise, pfl (Apple's pfl-research) in one and in two processes, and Flower's simulation on Ray. Each
turn of each is a process of its own; contestants take turns, and figures are medians over turns. The first round of a
process is not measured. Single processes run with one and with two threads, and the better median counts. Before the
turns, each runs a few rounds to find how many make a turn and whether all do the same work: the samples of a round and
the loss afterwards are part of the result.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import contestants

ROUNDS_BEFORE, MOST_ROUNDS = 5, 500
LIMIT = 600
PROCESSES = {  # name of a row: contestant, processes, numbers of threads to try
    "equipoise": ("ours", 1, (1, 2)),
    "pfl, 1 process": ("pfl", 1, (1, 2)),
    "pfl, 2 processes": ("pfl", 2, (1,)),
    "Flower, Ray": ("flower", 1, (1,)),
}


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run(row, case, data, rounds, threads):
    """Run a contestant, and return its answer."""
    contestant, processes, _ = PROCESSES[row]
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", "import contestants; contestants.work()", contestant, case, str(data)]
    command += ["--rounds", str(rounds), "--threads", str(threads)]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
    env |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    if contestant != "ours":  # which sets the number of threads itself
        env["OMP_NUM_THREADS"] = str(threads)
    addresses = ",".join(f"localhost:{port}" for port in free_ports(processes))
    started = []
    for rank in range(processes):
        own = {"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)} if processes > 1 else {}
        started.append(subprocess.Popen(command, env=env | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise SystemExit(f"{row}, {case}: {outputs[0][1].decode()[-2000:]}")
    answers = [json.loads(out.decode().strip().splitlines()[-1]) for out, _ in outputs]
    summed = {key: sum(answer[key] for answer in answers) for key in ("samples_per_round", "cpu_seconds_per_round")}
    if contestant == "flower":
        del summed["cpu_seconds_per_round"], answers[0]["cpu_seconds_per_round"]  # Ray's processes are not counted
    return answers[0] | summed


def measure(case, rows, seconds, turns):
    """Return the figures of all contestants in one case."""
    variants = [(row, threads) for row in rows for threads in PROCESSES[row][2]]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        contestants.write_data(contestants.CASES[case], data)
        before = {}
        for row, threads in variants:
            before[row, threads] = run(row, case, data, ROUNDS_BEFORE, threads)
            print(f"{case}, {row}, {threads} threads: {before[row, threads]}", file=sys.stderr, flush=True)
        speeds = {variant: [] for variant in variants}
        busy = {variant: [] for variant in variants}
        load = []  # the average number of programs that want to run, ours included
        for _ in range(turns):
            load.append(round(os.getloadavg()[0], 1))
            for row, threads in variants:
                rounds = round(seconds / before[row, threads]["seconds_per_round"])
                answer = run(row, case, data, min(MOST_ROUNDS, max(3, rounds)), threads)
                speeds[row, threads].append(answer["samples_per_round"] / answer["seconds_per_round"])
                if "cpu_seconds_per_round" in answer:
                    busy[row, threads].append(answer["samples_per_round"] / answer["cpu_seconds_per_round"])
    median = {variant: statistics.median(values) for variant, values in speeds.items()}
    best = {row: max((v for v in variants if v[0] == row), key=median.__getitem__) for row in rows}
    figures = {
        row: {
            "samples_per_second": round(median[variant]),
            "slowest_and_fastest_turn": [round(min(speeds[variant])), round(max(speeds[variant]))],
            "samples_per_cpu_second": round(statistics.median(busy[variant])) if busy[variant] else None,
            "ratio_of_equipoise": round(median[best[rows[0]]] / median[variant], 2),
            "threads_per_process": variant[1],
            "samples_per_round": before[variant]["samples_per_round"],
            f"loss_after_{1 + ROUNDS_BEFORE}_rounds": round(before[variant]["loss"], 4),
        }
        for row, variant in best.items()
    }
    return {"load_before_each_turn": load, **figures}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of a turn, about")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=contestants.CASES, default=list(contestants.CASES))
    parser.add_argument("--rows", nargs="+", choices=PROCESSES, default=list(PROCESSES))
    parser.add_argument("--out", help="also write the figures to this JSON file, beside those of other cases")
    options = parser.parse_args()
    result = {
        "what": f"FedAvg, {contestants.COHORT} of {contestants.CLIENTS} clients per round, plain SGD, one epoch, no "
        "evaluation; whole rounds, samples per second",
        "versions": {name: version(name) for name in ("equipoise", "pfl", "flwr", "ray", "torch")},
        "cases": {},
    }
    for case in options.cases:
        about = contestants.CASES[case]
        about = {"model": about.model, "inputs": about.shape, "batch": about.batch, "samples": about.samples}
        result["cases"][case] = about | measure(case, options.rows, options.seconds, options.turns)
        print(json.dumps({case: result["cases"][case]}, indent=2), flush=True)
        if options.out:
            path = Path(options.out)
            before = json.loads(path.read_text())["cases"] if path.exists() else {}
            path.write_text(json.dumps(result | {"cases": before | result["cases"]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
