"""Print the tables of docs/results/learn2pfed.md from the runs of the sweeps.

    python experiments/learn2pfed/tables.py RUNS [--scale small]

RUNS contains one folder per sweep with the name of its file (polynomial, segments, ablation, ...); missing sweeps are
skipped. The paper's figures are in parentheses.
"""

import argparse
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from equipoise import load_data
from equipoise.data.sources.polynomial import Polynomial
from equipoise.models import MODELS
from equipoise.reproduction.result_tables import markdown, runs_of, spread
from equipoise.storage.run_index import FinishedRun

HERE = Path(__file__).parent
PAPER: dict[str, Any] = tomllib.loads((HERE / "paper" / "tables.toml").read_text())
PRINTED = "learn2pfed as printed"


def method(run: FinishedRun) -> str:
    name = str(run.config["algorithm.name"])
    if name != "learn2pfed":
        return name
    outer, tied = run.config["algorithm.outer"], run.config["algorithm.tied"]
    whose = ", one Λ for all" if tied else ""
    return PRINTED if outer == "train" and not whose else f"learn2pfed, {outer}{whose}"


def scored(name: str) -> str:
    return "global" if name in ("fedavg", "fedprox") else "personal"


def stopped(run: FinishedRun) -> dict[str, float]:
    """Return the score at the evaluation that was best on validation samples, its round, and the last score."""
    kind = scored(run.config["algorithm.name"])
    metric, lines = run.summary["metric"], [line for line in run.metrics if kind in line]
    best = (min if metric == "rmse" else max)(lines, key=lambda line: line[kind][f"validation_{metric}"])
    return {"score": best[kind][metric], "round": best["round"], "last": lines[-1][kind][metric]}


def where(runs: Iterable[FinishedRun], **config: object) -> list[FinishedRun]:
    keys = {key.replace("__", "."): value for key, value in config.items()}
    return [run for run in runs if all(run.config.get(key) == value for key, value in keys.items())]


# Polynomials: the best possible errors, and which shared coefficients Λ has found.


def area(lam: np.ndarray, shared: int) -> float:
    """Return the area under the ROC curve: how often a shared coefficient is tied more strongly than another."""
    above, below = lam[:, :shared].reshape(-1, 1), lam[:, shared:].reshape(1, -1)
    return float(np.mean((above > below) + 0.5 * (above == below)))


@cache
def known(setting: int, seed: int, layout: str = "alike") -> dict[str, tuple[float, float]]:
    """Return RMSE and MSE of local least squares, and of an oracle that knows which coefficients are shared."""
    federation = load_data("polynomial", seed=seed, clients=10, setting=setting, layout=layout)
    shared = Polynomial(setting=setting).shared
    pairs = [federation.gather(torch.from_numpy(federation.train[i])) for i in range(10)]
    xs, ys = ([pair[k].double().numpy() for pair in pairs] for k in (0, 1))
    own = [np.linalg.lstsq(x, y, rcond=None)[0] for x, y in zip(xs, ys, strict=True)]
    free = 4 - shared
    wide = np.zeros((sum(map(len, xs)), shared + 10 * free))
    row = 0
    for i, x in enumerate(xs):
        wide[row : row + len(x), :shared] = x[:, :shared]
        wide[row : row + len(x), shared + i * free : shared + (i + 1) * free] = x[:, shared:]
        row += len(x)
    a = np.linalg.lstsq(wide, np.concatenate(ys), rcond=None)[0]
    oracle = [np.concatenate([a[:shared], a[shared + i * free : shared + (i + 1) * free]]) for i in range(10)]
    tests = [federation.gather(torch.from_numpy(federation.test[i])) for i in range(10)]

    def errors(models: list[np.ndarray]) -> tuple[float, float]:
        pairs = zip(models, tests, strict=True)
        squares = [float(np.mean((x.double().numpy() @ v - y.numpy()) ** 2)) for v, (x, y) in pairs]
        return mean(square**0.5 for square in squares), mean(squares)

    return {"local": errors(own), "oracle": errors(oracle)}


def lam_of(run: FinishedRun) -> np.ndarray:
    found: np.ndarray = load_file(run.path / "shown.safetensors")["lam"].numpy()
    return found


def mse(run: FinishedRun) -> float:
    """Return the mean squared error over clients, from the mean and the variance of their RMSE."""
    found = run.summary[scored(run.config["algorithm.name"])]
    return float(found["rmse"] ** 2 + found["rmse_variance"])


def table1(runs: list[FinishedRun], title: str = "Table I: RMSE against the noise-free polynomials") -> str:
    rows: list[list[str]] = []
    settings, layout = (1, 2, 3), runs[0].config["data.layout"]
    groups = sorted({(method(run), str(run.config["model.name"])) for run in runs}, key=lambda g: (g[1], g[0]))
    for name, model in groups:
        ours = [run for run in where(runs, model__name=model) if method(run) == name]
        by_setting = [where(ours, data__setting=setting) for setting in settings]
        meant = PAPER["table1"].get("learn2pfed" if name.startswith("learn2pfed") else name)
        row = [name, model]
        for k, found in enumerate(by_setting):
            values = [run.summary[scored(run.config["algorithm.name"])]["rmse"] for run in found]
            row.append(spread(values, 4) + (f" ({meant[k]:.4f})" if meant and layout == "alike" else ""))
        row.append(" / ".join(f"{1e4 * mean(map(mse, found)):.3g}" if found else "–" for found in by_setting))
        if name.startswith("learn2pfed"):
            areas = [[area(lam_of(run), 4 - s) for run in found] for s, found in zip(settings, by_setting, strict=True)]
            row.append(" / ".join(f"{mean(found):.2f}" if found else "–" for found in areas))
        rows.append([*row, ""][:7])
    for kind, name in (("local", "local least squares, in closed form"), ("oracle", "oracle")):
        seeds = sorted({run.config["seed"] for run in runs})
        found = [[known(s, seed, layout)[kind] for seed in seeds] for s in settings]
        squares = " / ".join(f"{1e4 * mean(square for _, square in each):.3g}" for each in found)
        rows.append([name, "linear", *(spread([root for root, _ in each], 4) for each in found), squares, ""])
    head = ["method", "model", *(f"setting {s}" for s in settings), "MSE × 10⁴", "ROC areas"]
    return markdown(title, head, rows)


def segments(runs: list[FinishedRun]) -> str:
    return table1(runs, "Each client has its own segment of x")


def table2(runs: list[FinishedRun]) -> str:
    rows = []
    for key, meant in PAPER["table2"].items():
        families = [] if key == "nothing" else key.split("-")
        row = [" ".join("Λ" if f == "lam" else f for f in families) or "nothing"]
        for k, setting in enumerate((1, 2, 3)):
            found = [r for r in where(runs, data__setting=setting) if list(r.config["algorithm.learn"]) == families]
            row.append(spread([run.summary["personal"]["rmse"] for run in found], 4) + f" ({meant[k]:.4f})")
        rows.append(row)
    return markdown(
        "Table II: which families are learned, RMSE", ["learned", "setting 1", "setting 2", "setting 3"], rows
    )


def depth(runs: list[FinishedRun]) -> str:
    def row(cells: int) -> list[str]:
        found = [where(runs, algorithm__cells=cells, data__setting=setting) for setting in (1, 2, 3)]
        return [str(cells), *(spread([run.summary["personal"]["rmse"] for run in group], 4) for group in found)]

    rows = map(row, sorted({run.config["algorithm.cells"] for run in runs}))
    return markdown("Number of cells, RMSE", ["L", "setting 1", "setting 2", "setting 3"], rows)


def variants(runs: list[FinishedRun]) -> str:
    def row(found: list[FinishedRun]) -> list[str]:
        config, values = found[0].config, [run.summary["personal"]["rmse"] for run in found]
        refs = [known(1, run.config["seed"]) for run in found]
        local, oracle = (mean(ref[k][0] for ref in refs) for k in ("local", "oracle"))
        areas = [area(lam_of(run), 3) for run in found]
        closed = (local - mean(values)) / (local - oracle)
        words = [config[f"algorithm.{key}"] for key in ("outer", "backward")]
        words += ["one for all" if config["algorithm.tied"] else "one per client"]
        words += ["last epoch's end" if config["algorithm.warm"] else "zero"]
        words += ["Λ" if len(config["algorithm.learn"]) == 1 else "all six"]
        sent = mean(run.summary["bytes_a_round"] for run in found) / 1e3
        return [*words, spread(values, 4), f"{closed:.0%}", f"{mean(areas):.2f}", f"{sent:.1f}"]

    keys = ("outer", "backward", "tied", "warm", "learn")
    groups: dict[tuple[str, ...], list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(tuple(str(run.config[f"algorithm.{key}"]) for key in keys), []).append(run)
    head = [
        "judged on",
        "backward",
        "Λ",
        "epochs begin at",
        "learned",
        "RMSE",
        "of the gap closed",
        "ROC area",
        "kB per round",
    ]
    return markdown("Variants, setting 1", head, map(row, groups.values()))


# Loads and images.


def table3(settings: dict[int, list[FinishedRun]]) -> str:
    rows = []
    both = [run for runs in settings.values() for run in runs]
    groups = sorted({(str(run.config["model.name"]), method(run)) for run in both})
    for model, name in groups:
        row: list[object] = [name, model]
        for k, runs in settings.items():
            found = [stopped(r) for r in where(runs, model__name=model) if method(r) == name]
            meant = PAPER["table3"].get("learn2pfed" if name.startswith("learn2pfed") else name)
            text = spread([f["score"] for f in found], 4) + (f" ({meant[k]:.4f})" if meant and found else "")
            row += [text, f"{found[0]['round']:.0f}" if found else ""]
            if k:
                unseen = [r.summary["unseen"] for r in where(runs, model__name=model) if method(r) == name]
                best = [u.get("personal", u.get("global", {})).get("rmse") for u in unseen]
                row.append(spread([v for v in best if v is not None], 4))
        rows.append(row)
    head = ["method", "model", "five clients", "round", "all clients", "round", "unseen clients"]
    return markdown("Table III: RMSE of the next hour's load", head[: 2 + 2 * len(settings) + (1 in settings)], rows)


def table4(columns: dict[str, tuple[list[FinishedRun], int]]) -> str:
    rows = []
    for name in PAPER["table4"]:
        row = [name]
        for runs, at in columns.values():
            for k, beta in enumerate((0.1, 0.5)):
                found = [
                    stopped(r) for r in where(runs, data__partition__beta=beta) if r.config["algorithm.name"] == name
                ]
                meant = PAPER["table4"][name][at + k]
                row.append(spread([100 * f["score"] for f in found]) + f" ({meant:.2f})" if found else "")
        first = next((runs for runs, _ in columns.values()), [])
        sent = [r.summary["bytes_a_round"] / 1e3 for r in where(first, algorithm__name=name)]
        rows.append([*row, f"{mean(sent):,.0f}" if sent else ""])
    heads = [f"{title}, Dir({beta})" for title in columns for beta in (0.1, 0.5)]
    return markdown("Table IV: accuracy in %", ["method", *heads, "kB per round"], rows)


def table5(runs: list[FinishedRun]) -> str:
    rows = []
    for run in sorted(runs, key=lambda r: -len(r.config["model.hidden"])):
        module = MODELS["lenet"](hidden=tuple(run.config["model.hidden"])).build((3, 32, 32), 10)
        kept = sum(p.numel() for p in module.body.parameters())  # type: ignore[union-attr]
        cells = run.summary["parameters_shared"] - 1  # without <u, u_bar>
        accuracy = 100 * stopped(run)["score"]
        rows.append([run.config["model.hidden"], f"{kept:,}", f"{cells:,}", f"{cells / kept:.2%}", f"{accuracy:.2f}"])
    head = ["layers before the cells", "parameters that stay", "sent in an exchange", "ratio", "accuracy in %"]
    return markdown("Table V: where the cells begin, CIFAR-10, Dir(0.1)", head, rows)


def table6() -> str:
    """Return the table of parameters and multiply-adds of a forward pass of one 32x32 colour image."""
    from torch.utils.flop_counter import FlopCounterMode

    rows = []
    for title, hidden in (("whole LeNet (FedAvg)", (120, 84)), ("convolutions and one linear head (Learn2pFed)", ())):
        module = MODELS["lenet"](hidden=hidden).build((3, 32, 32), 10)
        counter = FlopCounterMode(display=False)
        with counter:
            module(torch.zeros(1, 3, 32, 32))
        convolutions = sum(
            p.numel() for m in module.modules() if isinstance(m, torch.nn.Conv2d) for p in m.parameters()
        )
        total = sum(p.numel() for p in module.parameters())
        rows.append([title, f"{convolutions:,}", f"{total - convolutions:,}", f"{counter.get_total_flops() / 2e6:.4f}"])
    head = ["network", "convolutions", "linear layers", "million multiply-adds"]
    return markdown("Table VI: parameters and work of a client's network", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the sweeps")
    parser.add_argument("--scale", default="small", help="smoke, small or paper")
    given = parser.parse_args()

    def runs(name: str) -> list[FinishedRun]:
        return runs_of(HERE / f"{name}.toml", given.runs / name, given.scale)

    plain: dict[str, Callable[[list[FinishedRun]], str]] = {
        "polynomial": table1, "segments": segments, "ablation": table2, "depth": depth, "variants": variants,
        "start": table5,
    }  # fmt: skip
    for name, table in plain.items():
        if found := runs(name):
            print(table(found))
    loads = {k: found for k, name in enumerate(("electricity", "electricity-all")) if (found := runs(name))}
    if loads:
        print(table3(loads))
    images = {"Fashion-MNIST, 10": ("fashion-mnist", 2), "Fashion-MNIST, 100": ("fashion-mnist-100", 6)}
    images["CIFAR-10, 10"] = "cifar10", 0
    columns = {title: (found, at) for title, (name, at) in images.items() if (found := runs(name))}
    if columns:
        print(table4(columns))
    print(table6())


if __name__ == "__main__":
    main()
