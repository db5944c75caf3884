"""Checks before the first round that model, data, algorithm and settings fit together."""

from collections.abc import Mapping

import torch
from torch import nn

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import PredictsFromSamples, ReducesGroups
from equipoise.algorithms.schema import MessageSchema
from equipoise.config.device_classes import Devices
from equipoise.config.engine import Schedule
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import Federation
from equipoise.engine.reduction import message_origin, several_groups, shared_models
from equipoise.equilibrium import layers
from equipoise.errors import EquipoiseError
from equipoise.losses import LOSSES
from equipoise.reducers.context import no_origin
from equipoise.state import State
from equipoise.training.task import Task

_TRIED_ROUNDS = 100_000


def check_compatibility(task: Task, algorithm: Algorithm, schedule: Schedule, devices: Devices) -> None:
    """Raise an error if the parts of a run do not fit together, saying what does not fit and what would."""
    name, requires = type(algorithm).__name__, algorithm.requires
    if requires.labels and (task.sample[1].is_floating_point() or task.sample[1].ndim != 1):
        raise EquipoiseError(f"{name} works class by class and needs data with one label per sample")
    if requires.cross_entropy and task.loss is not LOSSES["cross-entropy"]:
        raise EquipoiseError(f"{name} changes the cross-entropy that models are trained with, so loss must be that")
    if requires.linear_head and not _has_linear_head(task):
        raise EquipoiseError(
            f"{name} computes the model's last layer by itself, so its head must be one submodule, a linear "
            f"layer of which nothing is frozen; here it is {task.space.described_head()}; name it with head="
        )
    if algorithm.schedule.kind == "function":  # a mistake in it is an error before the first round
        step = max(1, schedule.rounds // _TRIED_ROUNDS)  # in very long runs not every round is tried
        for round in (*range(1, schedule.rounds, step), schedule.rounds):
            algorithm.schedule.factor(round, schedule.rounds)
    if devices.iterations and not any(layers(task.module)):
        raise EquipoiseError(
            "[devices] sets the iterations of equilibrium layers, and the model has none; leave the section out"
        )
    if (requires.head_module or isinstance(algorithm, PredictsFromSamples)) and task.head is None:
        raise EquipoiseError(
            f"{name} uses the inputs of the model's head as features, so the head must be one submodule; here it is "
            f"{task.space.described_head()}; name the submodule that is the head"
        )
    if task.loss.pinball is not None and (requires.linear_head or isinstance(algorithm, PredictsFromSamples)):
        raise EquipoiseError(
            f"{name} computes its predictions from the targets themselves, which are no quantiles; leave out loss = "
            "'pinball', or choose another algorithm"
        )
    most = task.metric.bounds[1]
    if any(target > most for target in schedule.targets or ()):
        name = "an accuracy" if task.metric.name == "accuracy" else task.metric.name
        raise EquipoiseError(f"targets = {list(schedule.targets or ())} is not allowed; {name} is at most {most:g}")


def check_reducer(algorithm: Algorithm, uploads: UploadSettings, server: State, schema: MessageSchema) -> None:
    """Raise an error if the reducer cannot be used with the algorithm.

    Args:
        algorithm: the algorithm.
        uploads: what happens to uploads.
        server: the server's state before the first round.
        schema: the shapes of messages.
    """
    reducer, name = uploads.reducer, type(algorithm).__name__
    like = State({k: torch.empty(shape, dtype=dtype, device="meta") for k, (shape, dtype) in schema.up.items()})
    if reducer.needs_origin and message_origin(algorithm, server, like) is None:
        raise EquipoiseError(no_origin(reducer, name))
    if reducer.needs_model and not shared_models(algorithm, server, message_origin(algorithm, server, like)):
        raise EquipoiseError(
            f"reducer {type(reducer).__name__} changes the global model, and messages of {name} are not whole models "
            "of the kind that all clients share; use another reducer, such as 'norm-bound'"
        )
    if reducer.remembers and isinstance(algorithm, ReducesGroups):
        raise EquipoiseError(several_groups(reducer, name))


def check_attack(algorithm: Algorithm, uploads: UploadSettings, server: State, schema: MessageSchema) -> None:
    """Raise an error if the attack cannot be used with the algorithm.

    Args:
        algorithm: the algorithm.
        uploads: what happens to uploads.
        server: the server's state before the first round.
        schema: the shapes of messages.
    """
    attack, name = uploads.attack, type(algorithm).__name__
    if attack is None:
        return
    like = State({k: torch.empty(shape, dtype=dtype, device="meta") for k, (shape, dtype) in schema.up.items()})
    if attack.needs_origin and message_origin(algorithm, server, like) is None:
        raise EquipoiseError(
            f"the attack {type(attack).__name__} changes messages relative to what clients began with, and messages of "
            f"{name} are not changes of anything that the server knows; use one on the messages themselves, such as "
            "'alie' or 'mimic'"
        )
    if attack.needs_weights and "weight" not in schema.up:
        raise EquipoiseError(
            f"the attack {type(attack).__name__} lies about weights, and clients of {name} send none; choose another "
            "attack, or an algorithm that weighs clients, such as 'fedavg'"
        )


def check_batches(task: Task, algorithm: Algorithm, samples: Mapping[str, int]) -> None:
    """Raise an error if a client could not train, because the model needs more than one sample in a step.

    Args:
        task: the task, with the model.
        algorithm: the algorithm, with its batch size.
        samples: number of training samples of each client, by name.
    """
    if task.smallest_batch == 1:
        return
    why = "the model has BatchNorm, which cannot train on a single sample"
    if algorithm.batch == 1:
        raise EquipoiseError(f"algorithm.batch = 1 is not allowed: {why}")
    if (single := next((name for name, n in samples.items() if n == 1), None)) is not None:
        raise EquipoiseError(f"client {single!r} has one training sample, and {why}; give it more, or leave it out")


def check_data(task: Task, federation: Federation) -> None:
    """Raise an error if the model cannot handle all labels and all symbols in the data."""
    classes = federation.classes or 0
    by_class = any(metric.targets == "classes" for metric in task.metrics.metrics)
    if (task.loss is LOSSES["cross-entropy"] or by_class) and len(federation.y):
        if task.outputs < classes:
            raise EquipoiseError(
                f"there is a label {classes - 1}, and the model has only {task.outputs} outputs; it needs {classes}"
            )
        if (least := int(federation.y.min())) < 0:
            raise EquipoiseError(f"there is a label {least}; the classes must be numbered from 0")
    if not federation.x.is_floating_point() and federation.pixels is None:
        task.check_symbols(federation.x)


def _has_linear_head(task: Task) -> bool:
    head = None if task.head is None else task.module.get_submodule(task.head)
    return type(head) is nn.Linear and all(p.requires_grad for p in head.parameters())
