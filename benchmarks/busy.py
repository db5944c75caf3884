"""Measure how much slower stacked rounds of FedAvg are beside a process that keeps one core busy.

    python benchmarks/busy.py [--seconds 2] [--repeats 3] [--out FILE.json]

threads  one stack of clients per thread and one thread per operator, as Equipoise computes
openmp   one stack after another, with OpenMP threads inside each operator, as version 0.1 did: they wait for each other
         in a loop, which takes all their time when one of them has to share its core

Figures are medians over turns, in each of which all are measured one after another. With two cores, a third of the
machine's time goes to the busy process, so a share of 0.67 is all that can be had.
"""

import argparse
import json
import multiprocessing
import statistics
import time

from throughput import CASES, CORES, Ours

from equipoise.executors.stacked_trainer import StackWorker
from equipoise.executors.thread_pool import ThreadPool


def keep_busy():
    while True:
        pass


def with_openmp(contestant):
    """Let a run compute one stack after another, with all cores inside each operator."""
    executor = contestant.run.executor
    executor.close()
    executor.pool = ThreadPool(1, lambda: StackWorker(executor.module), inner=CORES)
    contestant.run.advance()
    return contestant


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
    made = {"threads": lambda: Ours(*CASES[case]), "openmp": lambda: with_openmp(Ours(*CASES[case]))}
    found = {(way, place): [] for way in made for place in ("alone", "beside")}
    for _ in range(repeats):
        for way, make in made.items():  # each sets torch's number of threads, so it is built in its turn
            run = make().run
            found[way, "alone"].append(rounds_per_second(run, seconds))
            found[way, "beside"].append(beside_busy(context, run, seconds))
            run.close()
    medians = {key: statistics.median(values) for key, values in found.items()}
    row = {"case": case}
    for way in made:
        row[f"{way}_rounds_per_second"] = round(medians[way, "alone"], 1)
        row[f"{way}_share_beside_busy"] = round(medians[way, "beside"] / medians[way, "alone"], 2)
    for place in ("alone", "beside"):
        row[f"threads_to_openmp_{place}"] = round(medians["threads", place] / medians["openmp", place], 2)
    return row


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
