"""Print the tables of docs/results/fedreco.md, and draw its picture.

    python experiments/fedreco/tables.py RUNS [SCALE [PICTURE]]

RUNS contains fedreco/, and in it one folder per sweep with the name of its file. Only the runs that the file lists at
the scale (default: small) count; missing runs are skipped. The paper's figures are in parentheses.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

from equipoise.reproduction.result_tables import markdown, runs_of, spread
from equipoise.storage.run_index import FinishedRun

PAPER: dict[str, Any] = tomllib.loads((Path(__file__).parent / "paper" / "tables.toml").read_text())
DATA = ("fashion-mnist", "cifar10")
LOCAL, FROZEN = "fedreco without its pull (local)", "fedreco with a fixed probe"
METHODS = ("fedavg", "fedavg-ft", "ditto", "fedrep", "fedbabu", "fedpac", "fedcr", "fedreco", LOCAL, FROZEN)
TARGETS = {"fashion-mnist": (0.88, 0.90, 0.91), "cifar10": (0.65, 0.70, 0.75)}


def method_of(run: FinishedRun) -> str:
    name = str(run.config["algorithm.name"])
    if name != "fedreco":
        return name
    if run.config["algorithm.lam"] == 0:
        return LOCAL
    return name if run.config["algorithm.server_lr"] else FROZEN


def accuracy(run: FinishedRun) -> float:
    """Return the accuracy in the paper's tables: of the global model for FedAvg, of the personal one for all others."""
    return 100 * float(run.summary["global" if method_of(run) == "fedavg" else "personal"]["accuracy"])


def rounds_to(run: FinishedRun, target: float) -> int | None:
    kind = "global" if method_of(run) == "fedavg" else "personal"
    scores = [(line["round"], line[kind]["accuracy"]) for line in run.metrics if kind in line]
    return next((round for round, score in scores if score >= target), None)


def tables_1_and_2(folder: Path, scale: str) -> None:
    here = Path(__file__).parent
    runs = {name: runs_of(here / f"{name}.toml", folder / name, scale) for name in DATA}
    body = []
    for method in METHODS:
        row: list[object] = [method]
        for k, name in enumerate(DATA):
            found = [accuracy(run) for run in runs[name] if method_of(run) == method]
            published = f" ({PAPER['table1'][method][k]:.2f})" if method in PAPER["table1"] and found else ""
            row.append(spread(found) + published)
        sent = [run.summary["parameters_shared"] for run in runs["fashion-mnist"] if method_of(run) == method]
        body.append([*row, f"{sent[0]:,}" if sent else "–"])
    print(markdown("Table 1: accuracy in %", ["method", *DATA, "numbers in a message (fashion-mnist)"], body))
    for name in DATA:
        body = []
        for method in METHODS:
            found = [run for run in runs[name] if method_of(run) == method]
            if found:
                body.append([method, *(rounds_to(found[0], target) or "–" for target in TARGETS[name])])
        head = ["method", *(f"to {100 * target:.0f}%" for target in TARGETS[name])]
        print(markdown(f"Rounds to an accuracy, {name}", head, body))


def table_3(folder: Path, scale: str) -> None:
    body = []
    for run in runs_of(Path(__file__).parent / "privacy.toml", folder / "privacy", scale):
        method, privacy = method_of(run), run.summary["privacy"]
        key = f"{method}-{privacy['epsilon_classical']:.2g}"
        published = f" ({PAPER['table3'][key][0]:.2f})" if key in PAPER["table3"] else ""
        figures = [privacy[k] for k in ("epsilon_classical", "epsilon_release", "epsilon_run")]
        shown = ["∞" if v is None else f"{v:.3g}" for v in figures]
        setting = [f"{privacy['clip']:g}", f"{privacy['sigma']:.3g}", privacy["delta"]]
        body.append([method, *setting, *shown, f"{accuracy(run):.2f}{published}"])
    head = ["method", "C", "σ", "δ", "ε of a release (textbook)", "ε of a release (exact)", "ε of the run", "accuracy"]
    print(markdown("Table 3: accuracy in % with noise, fashion-mnist", head, body))


def figure_3(folder: Path, scale: str, picture: Path) -> None:
    """Draw accuracy against rounds, without and with noise."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    here = Path(__file__).parent
    panels = [("without noise", "fashion-mnist"), ("with noise", "privacy")]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, (title, name) in zip(axes, panels, strict=True):
        for run in runs_of(here / f"{name}.toml", folder / name, scale):
            method = method_of(run)
            kind = "global" if method == "fedavg" else "personal"
            points = [(line["round"], 100 * line[kind]["accuracy"]) for line in run.metrics if kind in line]
            label = method + (f", ε {run.config['privacy.target_epsilon']:g}" if name == "privacy" else "")
            axis.plot(*zip(*points, strict=True), marker="." if len(points) < 15 else None, label=label)
        axis.set(title=title, xlabel="round", ylim=(0 if name == "privacy" else 70, 95))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="center" if name == "privacy" else "lower right")
    axes[0].set_ylabel("test accuracy, mean over clients (%)")
    figure.savefig(picture, dpi=130)


def tuned(folder: Path) -> None:
    for name in ("tune", "clip"):
        body = []
        for run in runs_of(Path(__file__).parent / f"{name}.toml", folder / name):
            keys = ("algorithm.name", "algorithm.lr", "algorithm.batch", "algorithm.momentum", "algorithm.lam")
            keys += ("algorithm.server_lr", "privacy.clip")
            kind = "global" if method_of(run) == "fedavg" else "personal"
            score = 100 * run.summary[kind]["validation_accuracy"]
            body.append([*(run.config.get(key, "–") for key in keys), f"{score:.2f}"])
        head = ["method", "lr", "batch", "momentum", "lam", "server_lr", "clip", "validation accuracy"]
        print(markdown(f"{name}.toml, after 15 rounds", head, body))


if __name__ == "__main__":
    root, size = Path(sys.argv[1]) / "fedreco", sys.argv[2] if len(sys.argv) > 2 else "small"
    tables_1_and_2(root, size)
    table_3(root, size)
    tuned(root)
    if len(sys.argv) > 3:
        figure_3(root, size, Path(sys.argv[3]))
