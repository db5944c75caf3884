"""The demonstration: five methods on the digits by writer that come with the package."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from equipoise.callbacks.base import Callback
from equipoise.config.experiment import Experiment
from equipoise.runs.launch import run
from equipoise.storage.run_index import FinishedRun, find_runs

ROUNDS = 20
METHODS: dict[str, dict[str, Any]] = {
    "local": {},
    "fedavg": {},
    "fedavg-ft": {"finetune_epochs": 3},
    "ditto": {"lam": 0.1},
    "fedrep": {"head_epochs": 3},
}
DEFAULT_FOLDER = Path("runs/demo")


def experiment(name: str) -> Experiment:
    """Return the experiment of the method with this name."""
    return Experiment.parse(
        {
            "rounds": ROUNDS,
            "participation": 0.5,
            "data": {"name": "digits-by-writer", "extent": "excerpt", "split": [0.6, 0.15, 0.25]},
            "model": {"name": "mlp", "hidden": [64]},
            "algorithm": {"name": name, "lr": 0.1, "epochs": 2, "batch": 10, **METHODS[name]},
        }
    )


def demo(out: Path, callback_of: Callable[[str], Callback]) -> list[FinishedRun]:
    """Run every method, or resume where an earlier demonstration stopped, and return the finished runs."""
    for name in METHODS:
        run(experiment(name), out / name, resume=True, callbacks=[callback_of(name)])
    return find_runs([out / name for name in METHODS])
