"""Callbacks of a run: their interface, those of the package by name, and how they are called."""

from collections.abc import Sequence

from equipoise.callbacks.base import Callback, RunContext
from equipoise.callbacks.best_model import BestModel
from equipoise.callbacks.checkpoints import Checkpoints
from equipoise.callbacks.early_stopping import EarlyStopping
from equipoise.callbacks.progress import Progress
from equipoise.callbacks.trackers import MLflow, TensorBoard, WandB
from equipoise.registry import Registry

CALLBACKS: Registry[Callback] = Registry(
    "callbacks",
    Callback,
    {
        "progress": Progress,
        "early-stopping": EarlyStopping,
        "best-model": BestModel,
        "checkpoints": Checkpoints,
        "tensorboard": TensorBoard,
        "mlflow": MLflow,
        "wandb": WandB,
    },
)


def with_trackers(callbacks: Sequence[Callback], track: Sequence[str]) -> list[Callback]:
    """Return these callbacks and the trackers that the setting `track` names, each of them once."""
    there = {type(callback) for callback in callbacks}
    return [*callbacks, *(CALLBACKS[name]() for name in dict.fromkeys(track) if CALLBACKS[name] not in there)]


__all__ = [
    "CALLBACKS",
    "BestModel",
    "Callback",
    "Checkpoints",
    "EarlyStopping",
    "MLflow",
    "Progress",
    "RunContext",
    "TensorBoard",
    "WandB",
    "with_trackers",
]
