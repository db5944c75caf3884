"""Measure the seconds until the first batch of a data set, and the memory it takes: cold, and from the cache.

    python benchmarks/data.py FOLDER_WITH_DATA [--json FILE] [--only SOURCE] [--uci-rows 140256]

Every figure comes from a separate process. Cold means that nothing has been decoded before; the files themselves may be
in the system's memory. Two data sets have no small file, so files with their layout are made here: FEMNIST's from the
digits that come with the package, and UCI's quarter-hourly text with random loads, a tenth as long as the real one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SOURCES = [
    *("digits-by-writer", "mnist", "fashion-mnist", "cifar10", "cifar100", "medical-mnist", "femnist"),
    *("shakespeare", "electricity", "electricity-uci", "polynomial", "linear"),
]

_CHILD = """
import json, sys, time
from pathlib import Path
from equipoise.config.experiment import Experiment
from equipoise.training.memory_usage import peak_memory_mb
name, folder = sys.argv[1], Path(sys.argv[2])
settings = {"name": name.removesuffix("-uci")}
if name in ("mnist", "fashion-mnist", "cifar10", "cifar100", "medical-mnist"):
    settings |= {"clients": 100, "partition": {"kind": "dirichlet"}}
experiment = Experiment.parse({"data": settings, "model": {"name": "softmax"}, "algorithm": {"name": "local"}})
import torch
before, began = peak_memory_mb(), time.perf_counter()
federation = experiment.federation(folder)
federation.gather(torch.from_numpy(federation.train[0][:50]))
seconds = time.perf_counter() - began
figures = {"title": federation.title, "samples": len(federation.x), "seconds": seconds}
figures["peak_mb"] = peak_memory_mb() - before
figures["inputs_mb"] = federation.x.numel() * federation.x.element_size() / 1e6
print(json.dumps(figures))
"""


def measure(name: str, folder: Path, cache: Path) -> dict[str, float]:
    env = {**os.environ, "EQUIPOISE_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, name, str(folder)], env=env, capture_output=True, text=True, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def make_femnist(folder: Path) -> None:
    from equipoise.data.sources.digits import load_excerpt

    pool = load_excerpt()
    users = {}
    for owner in np.unique(pool.owners):
        mine = pool.owners == owner
        users[str(owner)] = {"x": pool.x[mine].flatten(1).double().numpy().tolist(), "y": pool.y[mine].tolist()}
    tables = {"users": list(users), "num_samples": [len(u["y"]) for u in users.values()], "user_data": users}
    (folder / "femnist").mkdir(parents=True)
    (folder / "femnist" / "all_data_0.json").write_text(json.dumps(tables))


def make_uci(folder: Path, rows: int, clients: int = 370) -> None:
    rng = np.random.default_rng(0)
    moments = np.datetime64("2011-01-01T00:15") + np.arange(rows) * np.timedelta64(15, "m")
    with (folder / "LD2011_2014.txt").open("w") as file:
        file.write('"";' + ";".join(f'"MT_{i + 1:03d}"' for i in range(clients)) + "\n")
        for moment, loads in zip(moments, rng.gamma(2, 100, (rows, clients)), strict=True):
            cells = ";".join(f"{v:.14f}".replace(".", ",") for v in loads)
            file.write(f'"{str(moment).replace("T", " ")}:00";{cells}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of data sets")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", choices=SOURCES, help="measure only this data set")
    parser.add_argument(
        "--uci-rows", type=int, default=14_026, help="rows of the made UCI file; the real file has 140256"
    )
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        own = {"femnist": Path(made) / "a", "electricity-uci": Path(made) / "b"}
        for folder in own.values():
            folder.mkdir()
        make_femnist(own["femnist"])
        make_uci(own["electricity-uci"], options.uci_rows)
        for name in [options.only] if options.only else SOURCES:
            cache = Path(made) / "cache" / name
            cold, cached = (measure(name, own.get(name, options.folder.resolve()), cache) for _ in range(2))
            kept = sum(p.stat().st_size for p in cache.glob("*")) / 1e6
            row = {
                "source": name,
                "title": cold["title"],
                "samples": cold["samples"],
                "cold_seconds": round(cold["seconds"], 2),
                "cached_seconds": round(cached["seconds"], 2),
                "inputs_mb": round(cold["inputs_mb"], 1),
                "cold_peak_mb": round(cold["peak_mb"]),
                "cached_peak_mb": round(cached["peak_mb"]),
                "cache_mb": round(kept, 1),
            }
            rows.append(row)
            print(row, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"data": rows, "date": time.strftime("%Y-%m-%d")}, indent=2) + "\n")


if __name__ == "__main__":
    main()
