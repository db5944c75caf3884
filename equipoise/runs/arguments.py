"""Checks of what users give to `train`, each with a sentence that says what would be right."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.engine.model_files import checked_module
from equipoise.errors import EquipoiseError
from equipoise.registry import choose, load_object


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


def check_instance(name: str, value: Any, kind: type, example: str, optional: bool = True) -> None:
    """Raise an error unless an argument is of a kind.

    Args:
        name: name of the argument.
        value: its value.
        kind: the class that it must have.
        example: what would be right.
        optional: whether it may be None.
    """
    if isinstance(value, kind) or (optional and value is None):
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


def own_module(name: str) -> nn.Module:
    """Return the user's module that "package.module:Name" or "file.py:Name" names: a module, or what returns one."""
    found = load_object(name, "--model")
    if not isinstance(found, nn.Module) and callable(found):
        try:
            found = found()
        except Exception as error:  # whatever the user's code raises
            raise EquipoiseError(
                f"--model {name} cannot be called without arguments: {type(error).__name__}: {error}; name a function "
                "that returns the module"
            ) from error
    if not isinstance(found, nn.Module):
        raise EquipoiseError(f"--model {name} is of type {type(found).__name__}; it must give a torch nn.Module")
    return found


def as_values(name: str, value: Any) -> tuple[Any, ...]:
    """Return an argument that is a list as a tuple, or raise an error if it is one value."""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise EquipoiseError(f"{name} = {value!r} is not allowed; it must be a list, such as [{value!r}]")
    return tuple(value)


def as_folder(out: Any) -> Path | None:
    """Return the folder to write to, if one is given."""
    if out is None or isinstance(out, Path):
        return out
    if isinstance(out, str) and out:
        return Path(out)
    raise EquipoiseError(f"out = {out!r} is not allowed; it must be the path of a folder")
