"""Checks before the first round that model, data, algorithm and settings fit together."""

from torch import nn

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import PredictsFromSamples
from equipoise.config.device_classes import Devices
from equipoise.config.engine import Schedule
from equipoise.data.federation import Federation
from equipoise.equilibrium import layers
from equipoise.errors import EquipoiseError
from equipoise.losses import LOSSES
from equipoise.training.task import Task


def check_compatibility(task: Task, algorithm: Algorithm, schedule: Schedule, devices: Devices) -> None:
    """Raise an error if the parts of a run do not fit together, saying what does not fit and what would."""
    name, requires = type(algorithm).__name__, algorithm.requires
    if requires.labels and (task.sample[1].is_floating_point() or task.sample[1].ndim != 1):
        raise EquipoiseError(f"{name} works class by class and needs data with one label per sample")
    if requires.linear_head and not _has_linear_head(task):
        raise EquipoiseError(
            f"{name} estimates the model's last layer by least squares, so its head must be one submodule, a linear "
            "layer of which nothing is frozen; name it with head="
        )
    if devices.iterations and not any(layers(task.module)):
        raise EquipoiseError(
            "[devices] sets the iterations of equilibrium layers, and the model has none; leave the section out"
        )
    if isinstance(algorithm, PredictsFromSamples) and task.head is None:
        raise EquipoiseError(
            f"{name} looks samples up by the inputs of the model's head; name the submodule that is the head"
        )
    if task.metric.name == "accuracy" and any(target > 1 for target in schedule.targets or ()):
        raise EquipoiseError(f"targets = {list(schedule.targets or ())} is not allowed; an accuracy is at most 1")


def check_data(task: Task, federation: Federation) -> None:
    """Raise an error if the model cannot handle all labels and all symbols in the data."""
    classes = federation.classes or 0
    if task.loss is LOSSES["cross-entropy"] and len(federation.y):
        if task.outputs < classes:
            raise EquipoiseError(
                f"there is a label {classes - 1}, and the model has only {task.outputs} outputs; it needs {classes}"
            )
        if (least := int(federation.y.min())) < 0:
            raise EquipoiseError(f"there is a label {least}; the classes must be numbered from 0")
    if not federation.x.is_floating_point():
        task.check_symbols(federation.x)


def _has_linear_head(task: Task) -> bool:
    head = None if task.head is None else task.module.get_submodule(task.head)
    return type(head) is nn.Linear and all(p.requires_grad for p in head.parameters())
