"""Finished runs without training: what a comparison reads of them."""

from pathlib import Path
from typing import Any

from equipoise.storage.run_index import FinishedRun


def finished(
    algorithm: str,
    score: float,
    seed: int = 0,
    *,
    metric: str = "accuracy",
    higher: bool = True,
    kind: str = "personal",
    dataset: str = "digits",
    curve: tuple[float, ...] = (),
    loss_variance: float = 0.5,
    **config: Any,
) -> FinishedRun:
    """A run with one kind of model; its settings are given with __ in the place of dots."""
    settings = {"seed": seed, "rounds": 10, "algorithm.name": algorithm, "data.name": dataset}
    settings |= {key.replace("__", "."): value for key, value in config.items()}
    figures = {
        **{metric: score, f"{metric}_std": score / 10, f"{metric}_variance": 0.01},
        **{"worst_decile": score / 2, "best_decile": score, "gini": 0.1, "loss_variance": loss_variance},
    }
    summary = {
        **{"algorithm": algorithm, "dataset": dataset, "seed": seed, "clients": 5, "rounds": 10, "metric": metric},
        **{"higher_is_better": higher, kind: figures, "bytes_up": 1_000_000, "bytes_down": 500_000},
        **{"gradient_samples": 100, "seconds": 1.0},
    }
    lines = [{"round": at, kind: {metric: value, "loss": value}} for at, value in enumerate(curve or (score,), 1)]
    return FinishedRun(Path(f"{algorithm}-{seed}"), settings, summary, lines)
