"""Measure the time of a round of local training, relative to Ditto's.

    python benchmarks/fedreco.py --data DIR [--dataset NAME]

The setting is that of FedReCo's Table 1, with one thread per client. Methods take turns in the same process, so that
other load on the machine affects all of them alike. For each method the median over turns of its time divided by
Ditto's is printed.
"""

import argparse
from pathlib import Path
from statistics import median

from equipoise.config.experiment import Experiment
from equipoise.engine.assembly import experiment_task
from equipoise.engine.simulation import Simulation

METHODS = {
    "ditto": {},
    "fedreco": {},
    "fedrep": {},
    "fedpac": {},
    "fedbabu": {"epochs": 2},
    "fedavg": {"epochs": 2},
    "fedcr": {"epochs": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--dataset", default="fashion-mnist", help="fashion-mnist or cifar10")
    parser.add_argument("--turns", type=int, default=3, help="timed rounds of each method")
    parser.add_argument("--clients", type=int, default=10, help="clients in a round, of 50")
    arguments = parser.parse_args()
    labels = {"fashion-mnist": 4, "cifar10": 2}[arguments.dataset]
    runs = {}
    for name, settings in METHODS.items():
        tables = {
            "rounds": 10**6,
            "participation": arguments.clients,
            "evaluate_every": 10**6,
            "checkpoint_every": 10**6,
            "data": {
                "name": arguments.dataset,
                "clients": 50,
                "partition": {"kind": "labels", "per_client": labels},
                "split": [0.8, 0.06, 0.14],
            },
            "model": {"name": "gaussian-lenet" if name == "fedcr" else "lenet"},
            "algorithm": {"name": name, "lr": 0.01, "batch": 20, **settings},
            "engine": {"workers": 1},
        }
        experiment = Experiment.parse(tables)
        federation = experiment.federation(arguments.data)
        run = Simulation(
            experiment_task(experiment, federation),
            federation,
            experiment.algorithm,
            experiment.schedule,
            experiment.engine,
        )
        run.advance()
        runs[name] = run
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.turns):
        for name, run in runs.items():
            before = run.counters.seconds
            run.advance()
            seconds[name].append(run.counters.seconds - before)
    for name, run in runs.items():
        ratio = median(a / b for a, b in zip(seconds[name], seconds["ditto"], strict=True))
        print(f"{name:8}  {ratio:.2f} of Ditto's time per round  ({median(seconds[name]):.2f} s)")
        run.close()


if __name__ == "__main__":
    main()
