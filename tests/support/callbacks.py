"""Callbacks that break runs off or raise, and small runs to try callbacks on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import equipoise as eq
from equipoise.callbacks.base import Line
from tests.support.flower_memory import Killed

CLOCK = ("seconds", "samples_per_second", "peak_memory_mb")
"""Figures of a summary that depend on the machine."""
RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(40, 4)).astype("float32"), RNG.integers(0, 3, 40)) for _ in range(4)]


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def train(callbacks: list[Any], rounds: int = 12, **options: Any) -> eq.Result:
    """Train four clients on noise, which validates better at some times than at others."""
    algorithm = options.pop("algorithm", None) or eq.Ditto(batch=5, lr=0.3, lam=0.1)
    options = {"head": None, "checkpoint_every": 3, **options}
    return eq.train(module(), CLIENTS, algorithm, rounds=rounds, callbacks=callbacks, **options)


class Kill(eq.Callback):
    """Ends the process, as it were, at the end of a round; as an observer it changes no setting of the run."""

    affects_results = False

    def __init__(self, after: int):
        super().__init__()
        self.after = after

    def on_round_end(self, line: Line) -> None:
        if line["round"] == self.after:
            raise Killed


class Listener(eq.Callback):
    """Remembers what it was called with."""

    affects_results = False

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.texts: list[str] = []

    def on_run_begin(self) -> None:
        self.events.append(("begin", self.run.done))

    def on_evaluation(self, line: Line) -> None:
        self.events.append(("evaluation", line["round"]))

    def on_round_end(self, line: Line) -> None:
        self.events.append(("round", line["round"], line))

    def on_message(self, text: str) -> None:
        self.texts.append(text)

    def on_run_end(self, summary: dict[str, Any]) -> None:
        self.events.append(("end", summary))

    def on_interrupt(self, failed: bool) -> None:
        self.events.append(("interrupt", failed))


class StopAt(eq.Callback):
    """Stops a run at the end of a round."""

    round: int

    def on_round_end(self, line: Line) -> None:
        if line["round"] == self.round:
            self.stop(f"round {self.round} was enough")


def contents(folder: Path) -> dict[str, bytes]:
    """What a finished run wrote, without what depends on the clock."""
    found = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "clients.csv")}
    summary = json.loads((folder / "summary.json").read_text())
    found["summary.json"] = json.dumps({k: v for k, v in summary.items() if k not in CLOCK}).encode()
    return found | {path.name: path.read_bytes() for path in sorted((folder / "best").glob("*"))}
