"""Print the tables of docs/results/fedeq.md from the runs of the sweeps.

    python experiments/fedeq/tables.py RUNS [SCALE]

RUNS contains fedeq/ and fl-deq/, and in them one folder per sweep with the name of its file. Only the runs that the
file lists at the scale (default: small) count; missing runs are skipped. The paper's figures are in parentheses.
"""

import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from equipoise.reproduction.result_tables import markdown, runs_of, spread
from equipoise.storage.run_index import FinishedRun

PAPER: dict[str, Any] = tomllib.loads((Path(__file__).parent / "paper" / "tables.toml").read_text())
FROM_CONSENSUS = "fedeq from the consensus"
METHODS = ("local", "fedavg", "fedavg-ft", "ditto", "fedper", "fedrep", "knn-per", "fedeq", FROM_CONSENSUS)
Cells = Sequence[object]


SCALE: list[str] = []


def runs_in(folder: Path) -> list[FinishedRun]:
    """Return the finished runs that the file of the folder's name lists."""
    file = Path(__file__).parent.parent / folder.parent.name / f"{folder.name}.toml"
    return runs_of(file, folder, SCALE[0] if SCALE else None)


def milliseconds(run: FinishedRun) -> float:
    """Return the milliseconds of training per sample, without scoring."""
    lines = [json.loads(line) for line in (run.path / "timings.jsonl").read_text().splitlines()]
    return 1e3 * sum(line["train"] for line in lines) / float(run.metrics[-1]["gradient_samples"])


def print_table(title: str, head: Cells, body: Iterable[Cells]) -> None:
    print(markdown(title, head, body))


def accuracies(runs: Iterable[FinishedRun], kind: str, unseen: bool = False) -> list[float]:
    found = [run.summary.get("unseen", {}) if unseen else run.summary for run in runs]
    return [100 * summary[kind]["accuracy"] for summary in found if kind in summary]


def column(run: FinishedRun) -> str:
    data = run.config["data.name"]
    labels = run.config.get("data.partition.per_client")
    return f"{data}-{labels}" if labels else str(data)


def published(table: str, method: str, name: str) -> str:
    columns = PAPER[table]["columns"]
    at = {"digits-by-writer": "femnist"}.get(name, name)
    return f" ({PAPER[table][method][columns.index(at)]:.2f})" if at in columns and method in PAPER[table] else ""


def scored(method: str) -> str:
    """Return the kind of model in the paper's table: global for FedAvg, personal for all others."""
    return "global" if method == "fedavg" else "personal"


def method_of(run: FinishedRun) -> str:
    return FROM_CONSENSUS if run.config.get("algorithm.begin") == "consensus" else str(run.config["algorithm.name"])


def by_method(runs: list[FinishedRun]) -> dict[str, list[FinishedRun]]:
    return {name: [run for run in runs if method_of(run) == name] for name in METHODS}


def tables_1_and_2(root: Path) -> None:
    every = [run for name in ("digits-by-writer", "cifar10", "cifar100", "shakespeare") for run in runs_in(root / name)]
    names = list(dict.fromkeys(column(run) for run in every))
    methods = by_method(every)

    def cell(method: str, name: str, kind: str, table: str, unseen: bool = False) -> str:
        values = accuracies((run for run in methods[method] if column(run) == name), kind, unseen)
        return spread(values) + (published(table, method, name) if values and table else "")

    body = [[method, *(cell(method, name, scored(method), "table1") for name in names)] for method in METHODS]
    for method in ("fedeq", FROM_CONSENSUS):
        body.append([f"{method}: consensus model", *(cell(method, name, "consensus", "") for name in names)])
    print_table("Table 1: clients that trained", ["method", *names], body if every else [])
    body = [[method, *(cell(method, name, scored(method), "table2", True) for name in names)] for method in METHODS]
    print_table("Table 2: clients that took no part in training", ["method", *names], body if every else [])
    print_table(
        "Costs",
        [
            "data",
            "method",
            "shared",
            "kept by a client",
            "KB per round",
            "step MB",
            "iterations",
            "gradients",
            "seconds",
        ],
        [[name, *cost([r for r in methods[m] if column(r) == name])] for name in names for m in METHODS],
    )


def cost(runs: list[FinishedRun]) -> Cells:
    if not runs:
        return ["–"] * 8
    first = runs[0].summary
    iterations = f"{first['solver_iterations']:.1f}" if "solver_iterations" in first else "–"
    return [
        method_of(runs[0]),
        f"{first['parameters_shared']:,}",
        f"{first['parameters_personal']:,}",
        f"{first['bytes_a_round'] / 1e3:,.0f}",
        f"{first['step_memory_mb']:.2f}",
        iterations,
        f"{mean(run.summary['gradient_samples'] for run in runs):,.0f}",
        f"{mean(run.summary['seconds'] for run in runs):.0f}",
    ]


def curves(
    root: Path, name: str, title: str, key: Callable[[FinishedRun], Cells], head: Cells, rounds: Sequence[int]
) -> None:
    """Print scores after these rounds, with one seed."""
    body = []
    for run in sorted(runs_in(root / name), key=lambda run: [str(k) for k in key(run)]):
        for kind in ("personal", "consensus", "global"):
            lines = {line["round"]: line[kind] for line in run.metrics if kind in line}
            if lines:
                scores = [f"{100 * lines[r]['accuracy']:.2f}" if r in lines else "–" for r in rounds]
                losses = f"{lines[max(lines)]['loss']:.3f}" if lines[max(lines)]["loss"] is not None else "diverged"
                body.append([*key(run), kind, *scores, losses])
    print_table(title, [*head, "model", *(f"round {r}" for r in rounds), "loss at the end"], body)


def sizes(root: Path, name: str, title: str) -> None:
    body = []
    for run in runs_in(root / name):
        kind = "personal" if "personal" in run.summary else "global"
        body.append(
            [
                run.config["algorithm.name"],
                model(run),
                f"{run.summary['parameters_shared']:,}",
                f"{run.summary['step_memory_mb']:.2f}",
                f"{milliseconds(run):.2f}",
                f"{100 * run.summary[kind]['accuracy']:.2f}",
            ]
        )
    body.sort(key=lambda row: int(row[2].replace(",", "")))
    print_table(title, ["method", "model", "shared", "step MB", "ms per sample", "accuracy"], body)


def model(run: FinishedRun) -> str:
    parts = [str(run.config["model.name"])]
    for key in ("channels", "width", "blocks", "layers", "activation"):
        if (value := run.config.get(f"model.{key}")) is not None:
            parts.append(f"{key} {value}")
    return ", ".join(parts)


def devices(root: Path) -> None:
    groups: dict[tuple[str, str], list[FinishedRun]] = {}
    for run in runs_in(root / "devices"):
        weak = "40% at 3" if len(run.summary["devices"]) > 1 else "all at 10"
        how = f"{weak}, {run.config['algorithm.fusion']}" if weak != "all at 10" else weak
        groups.setdefault((run.config["data.partition.kind"], how), []).append(run)
    body = []
    for (kind, how), runs in sorted(groups.items()):
        targets = list(runs[0].summary["rounds_to"]["global"])
        reached = [[run.summary["rounds_to"]["global"][t] for run in runs] for t in targets]
        first = [f"{mean(found):.0f}" if all(found) else "–" for found in reached]
        iterations = spread([run.summary["solver_iterations"] for run in runs], 1)
        body.append([kind, how, len(runs), spread(accuracies(runs, "global")), iterations, *first])
    shown = [f"rounds to {t}" for t in (list(runs[0].summary["rounds_to"]["global"]) if body else [])]
    print_table("FL-DEQ, Fig. 4: devices", ["data", "devices", "seeds", "accuracy", "iterations", *shown], body)


def fl_deq(root: Path, name: str, title: str) -> None:
    body = []
    for run in runs_in(root / name):
        targets = run.summary["rounds_to"]["global"]
        depth = run.config.get("model.blocks", run.config.get("model.layers", "5"))
        body.append(
            [
                run.config["data.partition.kind"],
                f"{run.config['model.name']}, {depth}",
                f"{run.summary['parameters_shared']:,}",
                f"{run.summary['parameters_sent'] / 1e6:.1f}",
                f"{100 * run.summary['global']['accuracy']:.2f}",
                *(found or "–" for found in targets.values()),
            ]
        )
    head = (
        ["data", "model", "parameters", "sent (millions)", "accuracy", *(f"rounds to {t}" for t in targets)]
        if body
        else []
    )
    print_table(title, head, sorted(body))


def main(root: Path) -> None:
    fedeq, fl = root / "fedeq", root / "fl-deq"
    tables_1_and_2(fedeq)
    sizes(fedeq, "size", "Figs. 3 and 4: size, memory and accuracy on digits by writer")
    sizes(fedeq, "memory", "Fig. 4: memory and time at the paper's sizes, one round")
    settings = ("begin", "average", "rho")
    rho: Callable[[FinishedRun], Cells] = lambda run: [run.config[f"algorithm.{k}"] for k in settings]  # noqa: E731
    curves(fedeq, "rho", "Fig. 5: rho", rho, settings, (15, 30))
    keys = ("name", "head_epochs", "epochs")
    passes: Callable[[FinishedRun], Cells] = lambda run: [run.config.get(f"algorithm.{k}", "–") for k in keys]  # noqa: E731
    curves(fedeq, "epochs", "Fig. 6: passes", passes, ["method", "head", "body"], (10, 20))
    bounded: Callable[[FinishedRun], Cells] = lambda run: [run.config["model.contraction"], run.config["algorithm.lr"]]  # noqa: E731
    curves(fedeq, "projection", "Fig. 2: projection", bounded, ["projected", "lr"], (10, 20, 40))
    fl_deq(fl, "blocks", "FL-DEQ, Figs. 1 and 2: residual blocks")
    fl_deq(fl, "layers", "FL-DEQ, Fig. 3: convolutions")
    devices(fl)


if __name__ == "__main__":
    SCALE += sys.argv[2:]
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs"))
