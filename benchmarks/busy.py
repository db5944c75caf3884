"""Measure how much slower stacked rounds of FedAvg are beside a process that keeps one core busy.

    python benchmarks/busy.py [--seconds 2] [--repeats 3] [--out FILE.json]

Figures are medians over turns, in each of which rounds are timed alone and beside the busy process. With two cores and
two threads, two thirds of the machine's time are left, so a share of about 0.67 is what a fair scheduler gives.
Threads inside an operator, which wait for each other in a loop, get far less.
"""

import argparse
import json
import multiprocessing
import statistics
import time

from throughput import CASES, CORES, Ours


def keep_busy():
    while True:
        pass


def rounds_per_second(run, seconds):
    run.advance()
    rounds, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        run.advance()
        rounds += 1
    return rounds / (time.perf_counter() - began)


def beside_busy(context, run, seconds):
    process = context.Process(target=keep_busy, daemon=True)
    process.start()
    try:
        return rounds_per_second(run, seconds)
    finally:
        process.terminate()
        process.join()


def measure(case, context, seconds, repeats):
    run = Ours(*CASES[case]).run
    alone, beside = [], []
    for _ in range(repeats):
        alone.append(rounds_per_second(run, seconds))
        beside.append(beside_busy(context, run, seconds))
    run.close()
    return {
        "case": case,
        "rounds_per_second": round(statistics.median(alone), 1),
        "share_beside_busy": round(statistics.median(b / a for a, b in zip(alone, beside, strict=True)), 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one turn")
    parser.add_argument("--repeats", type=int, default=3, help="number of turns")
    parser.add_argument("--out", help="also write the figures to this JSON file")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = [measure(case, context, options.seconds, options.repeats) for case in ("softmax-100", "mlp-100")]
    text = json.dumps({"cores": CORES, "busy": rows}, indent=2)
    print(text)
    if options.out:
        with open(options.out, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
