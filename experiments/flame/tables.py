"""Print the tables of docs/results/flame.md from the runs of the sweeps.

    python experiments/flame/tables.py RUNS

RUNS contains one folder per sweep: table3-fashion-mnist, table3-mnist, tune, attacks, sweep-lam, ...; missing sweeps
are skipped. ▲ and ▼ mark figures that differ from the paper's by more than both standard deviations together.
"""

import sys
import tomllib
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from equipoise.storage.run_index import FinishedRun, find_runs

PAPER: dict[str, Any] = tomllib.loads((Path(__file__).parent / "paper" / "tables.toml").read_text())
TITLES = {
    "hybrid": "hybrid",
    "dirichlet": "label, Dir(0.5)",
    **{f"labels-{k}": f"label, {k}" for k in range(2, 7)},
    "quality": "quality, Gau(0.1)",
    "quantity": "quantity, Dir(0.5)",
    "features": "features, by writer",
}


def finished(folder: Path) -> list[FinishedRun]:
    done = [path for path in sorted(folder.glob("*")) if (path / "summary.json").exists()]
    return find_runs(done) if done else []


def partition(run: FinishedRun) -> str:
    kind = run.config["data.partition.kind"]
    if kind == "natural":
        return "features"
    return f"labels-{run.config['data.partition.per_client']}" if kind == "labels" else str(kind)


def figure(values: list[float]) -> str:
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def at_compute(run: FinishedRun, kind: str, samples: float) -> float | None:
    """Return the score at the last evaluation with at most this many samples in backward passes."""
    found = [
        line[kind]["accuracy"] for line in run.metrics if kind in line and line["gradient_samples"] <= 1.001 * samples
    ]
    return 100 * found[-1] if found else None


def cells(runs: list[FinishedRun], algorithm: str, kind: str, name: str) -> list[float]:
    return [
        100 * run.summary[kind]["accuracy"]
        for run in runs
        if run.config["algorithm.name"] == algorithm and partition(run) == name and kind in run.summary
    ]


def table3(data: str, runs: list[FinishedRun]) -> None:
    columns = [column.split() for column in PAPER["columns"]]
    head = ["partition", *(f"{a} {k}" for a, k in columns), "seeds"]
    print(f"\n### {runs[0].summary['dataset']}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    near = {"personal": 0, "global": 0, "both": 0}
    paper = PAPER["table3"][data]
    for name in (name for name in TITLES if name in paper):
        texts, differences, seeds = [], {}, set()
        for (algorithm, kind), (value, spread) in zip(columns, paper[name], strict=True):
            found = cells(runs, algorithm, kind, name)
            if not found:
                texts.append(f"– ({value:.2f})")
                continue
            seeds.add(len(found))
            gap = mean(found) - value
            mark = "" if abs(gap) <= spread + (stdev(found) if len(found) > 1 else 0) else " ▲" if gap > 0 else " ▼"
            texts.append(f"{figure(found)} ({value:.2f}){mark}")
            if algorithm == "flame":
                differences[kind] = abs(gap)
        if not seeds:
            continue
        near["personal"] += differences.get("personal", 99) <= 3
        near["global"] += differences.get("global", 99) <= 6
        near["both"] += differences.get("personal", 99) <= 3 and differences.get("global", 99) <= 6
        trials = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
        print(f"| {TITLES[name]} | {' | '.join(texts)} | {trials} |")
    minutes = sum(run.summary["seconds"] for run in runs) / 60
    within = f"personal within 3 points {near['personal']} times, global within 6 {near['global']} times"
    print(f"\nFLAME: {within}, both {near['both']} times.")
    print(f"{len(runs)} runs of {runs[0].summary['rounds']} rounds, {minutes:.0f} minutes of run time.")


def compute(runs: list[FinishedRun]) -> None:
    columns = [("flame", "personal"), ("flame", "global"), ("pfedme", "personal"), ("pfedme", "global")]
    columns += [("ditto", "personal"), ("ditto", "global")]
    print(f"\n| partition | {' | '.join(f'{a} {k}' for a, k in columns)} |\n|{'---|' * 7}")
    for name in TITLES:
        texts = []
        for algorithm, kind in columns:
            found = []
            for run in runs:
                if run.config["algorithm.name"] == algorithm and partition(run) == name:
                    twins = [
                        r for r in runs if r.config["algorithm.name"] == "flame" and partition(r) == name
                        and r.summary["seed"] == run.summary["seed"]
                    ]  # fmt: skip
                    if twins and (value := at_compute(run, kind, twins[0].summary["gradient_samples"])) is not None:
                        found.append(value)
            texts.append(figure(found) if found else "–")
        if any(text != "–" for text in texts):
            print(f"| {TITLES[name]} | {' | '.join(texts)} |")


def tune(runs: list[FinishedRun]) -> None:
    print("\n| partition | method | " + " | ".join(str(r) for r in RATES) + " |\n|---|---|" + "---|" * len(RATES))
    for name in TITLES:
        for algorithm, key in (("pfedme", "algorithm.global_lr"), ("ditto", "algorithm.lr")):
            found = {
                run.config[key]: 100 * run.summary["global"]["validation_accuracy"]
                for run in runs
                if run.config["algorithm.name"] == algorithm and partition(run) == name
            }
            if found:
                texts = [f"{found[rate]:.2f}" if rate in found else "–" for rate in RATES]
                print(f"| {TITLES[name]} | {algorithm} | {' | '.join(texts)} |")


RATES = (0.01, 0.05, 0.1, 0.2, 0.5)


def attacks(runs: list[FinishedRun]) -> None:
    kinds = [("flame", "personal"), ("flame", "global"), ("flame", "hybrid"), ("pfedme", "personal")]
    kinds += [("pfedme", "global"), ("ditto", "personal"), ("ditto", "global"), ("fedavg", "global")]
    names = [f"{a} {k}" if a != "fedavg" else "multi-Krum global" for a, k in kinds]
    print(f"\n| attack | malicious | {' | '.join(names)} |\n|---|---|{'---|' * len(kinds)}")
    conditions = sorted({(run.config["attack.name"], run.config["attack.fraction"]) for run in runs})
    conditions.sort(key=lambda c: (c[1] > 0, c))
    for attack, fraction in conditions:
        texts = []
        for algorithm, kind in kinds:
            found = [
                100 * run.summary[kind]["accuracy"]
                for run in runs
                if (run.config["attack.name"], run.config["attack.fraction"]) == (attack, fraction)
                and run.config["algorithm.name"] == algorithm
                and kind in run.summary
            ]
            texts.append(figure(found) if found else "–")
        print(f"| {attack if fraction else 'none'} | {fraction:.0%} | {' | '.join(texts)} |")


def sweep(key: str, runs: list[FinishedRun]) -> None:
    config = {"lam": "algorithm.lam", "epochs": "algorithm.epochs", "rho": "algorithm.rho", "clients": "participation"}
    rounds = (10, 20, 50, 100)
    head = [key, "model", *(f"round {r}" for r in rounds), "accuracy at the end"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for run in sorted(runs, key=lambda run: run.config[config[key]]):
        for kind in ("personal", "global"):
            losses = {line["round"]: line[kind]["loss"] for line in run.metrics if kind in line}
            texts = [f"{losses[r]:.3f}" if r in losses else "–" for r in rounds]
            last = 100 * run.summary[kind]["accuracy"]
            print(f"| {run.config[config[key]]} | {kind} | {' | '.join(texts)} | {last:.2f} |")


def fairness(runs: list[FinishedRun]) -> None:
    head = ["method", "model", "accuracy", "worst tenth", "best tenth", "Gini", "variance of losses"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for algorithm in ("flame", "pfedme", "ditto"):
        for kind in ("hybrid", "personal", "global"):
            same = [r for r in runs if r.config["algorithm.name"] == algorithm and partition(r) == "hybrid"]
            mine = [run.summary[kind] for run in same]
            if mine:
                row = [figure([100 * m[k] for m in mine]) for k in ("accuracy", "worst_decile", "best_decile")]
                row += [f"{mean(m[k] for m in mine):.4f}" for k in ("gini", "loss_variance")]
                print(f"| {algorithm} | {kind} | {' | '.join(row)} |")


def main(folder: Path) -> None:
    for data in ("fashion-mnist", "mnist", "cifar10", "medical-mnist", "digits-by-writer"):
        if runs := finished(folder / f"table3-{data}"):
            print(f"\n## Table III, {data}")
            table3(data, runs)
            print("\nAt FLAME's number of samples in backward passes:")
            compute(runs)
            if data == "fashion-mnist":
                print("\n## Fairness (Fig. 8), hybrid skew")
                fairness(runs)
    if runs := finished(folder / "tune"):
        print("\n## Learning rates, validation accuracy of the global model")
        tune(runs)
    if runs := [*finished(folder / "attacks"), *finished(folder / "attacks-multi-krum")]:
        print("\n## Attacks (Figs. 4 to 7)")
        attacks(runs)
    for key in ("lam", "epochs", "rho", "clients"):
        if runs := finished(folder / f"sweep-{key}"):
            print(f"\n## Sweep over {key}, test losses")
            sweep(key, runs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
