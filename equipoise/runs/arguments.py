"""Checks of what users give to `train`, each with a sentence that says what would be right."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.engine.model_files import checked_module
from equipoise.errors import EquipoiseError
from equipoise.registry import choose


def as_algorithm(algorithm: Any) -> Algorithm:
    """Return the algorithm that is given as such, or by its name with default settings."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, str):
        return choose(ALGORITHMS, {"algorithm": algorithm}, "train", "algorithm")[1]
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        name = algorithm.__name__
        raise EquipoiseError(f"algorithm is the class {name}; create it with its settings, such as {name}(lr=0.1)")
    raise EquipoiseError(
        f"algorithm is of type {type(algorithm).__name__}; it must be an algorithm with its settings, such as "
        "equipoise.Ditto(lam=0.1), or a name, such as 'ditto'"
    )


def check_instance(name: str, value: Any, kind: type, example: str) -> None:
    """Raise an error unless an argument is of a kind.

    Args:
        name: name of the argument.
        value: its value; None is allowed.
        kind: the class that it must have.
        example: what would be right.
    """
    if value is None or isinstance(value, kind):
        return
    if isinstance(value, type) and issubclass(value, kind):
        raise EquipoiseError(f"{name} is the class {value.__name__}; create it with its settings, such as {example}")
    raise EquipoiseError(f"{name} is of type {type(value).__name__}; it must be {example}")


def check_module(module: Any) -> None:
    """Raise an error unless this is a module whose weights exist and are finite."""
    for name, parameter in checked_module(module).named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise EquipoiseError(
                f"the module's {name!r} has no shape yet (a lazy layer); call the module on a batch first"
            )
        if parameter.is_meta:
            raise EquipoiseError(f"the module's {name!r} has no values yet (it is on the device 'meta')")
        if parameter.is_floating_point() and not torch.isfinite(parameter).all():
            raise EquipoiseError(f"the module's {name!r} has NaN or infinite numbers before training")


def check_head(head: Any) -> None:
    """Raise an error unless the head is named by a string, by several, or not at all."""
    names = (head,) if isinstance(head, str) or head is None else head
    if isinstance(names, (tuple, list)) and all(name is None or isinstance(name, str) for name in names):
        return
    raise EquipoiseError(
        f"head is of type {type(head).__name__}; it must be the name of a submodule, such as 'fc', a list of names, or "
        "None"
    )


def as_folder(out: Any) -> Path | None:
    """Return the folder to write to, if one is given."""
    if out is None or isinstance(out, Path):
        return out
    if isinstance(out, str) and out:
        return Path(out)
    raise EquipoiseError(f"out = {out!r} is not allowed; it must be the path of a folder")
