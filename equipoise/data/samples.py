"""Clients' samples as the user gives them: arrays, lists, tensors or a Dataset, turned into pairs of tensors."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from equipoise.data.text_encoding import numbered
from equipoise.errors import EquipoiseError

SPLITS = ("train", "validation", "test")

_WIDER = {"uint16": "int64", "uint32": "int64", "uint64": "int64", "longdouble": "float64", "float128": "float64"}
_KINDS = {"O": "objects", "U": "strings", "S": "strings", "M": "dates", "m": "durations", "c": "complex numbers"}
_TABLES = "DataFrame"
"""Name of the class that pandas and other libraries give to tables with named columns."""


def is_array(value: Any) -> bool:
    """Tell whether a value is one array: a tensor, a numpy array, or a table with a method `to_numpy`."""
    return isinstance(value, (Tensor, np.ndarray)) or hasattr(value, "to_numpy")


def as_pair(part: Any, client: str) -> tuple[Tensor, Tensor]:
    """Return a client's samples as tensors (x, y), with targets that are whole numbers as int64.

    Args:
        part: a pair of arrays (x, y), or a torch Dataset of such pairs.
        client: the client's name, for error messages.
    """
    who = f"client {client!r}"
    if isinstance(part, DataLoader):
        raise EquipoiseError(f"{who} is a DataLoader; give its dataset (loader.dataset), batches are made in training")
    if is_array(part):
        table = " (such as frame[columns].to_numpy() and frame[target].to_numpy())" if _is_table(part) else ""
        raise EquipoiseError(f"{who} is one {type(part).__name__}; it must be a pair of arrays (x, y){table}")
    if not isinstance(part, (tuple, list)) and hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        part = _columns(part, who)
    if not isinstance(part, (tuple, list)):
        raise EquipoiseError(f"{who} is {_type(part)}; it must be a pair of arrays (x, y), or a torch Dataset of pairs")
    if len(part) != 2:
        raise EquipoiseError(
            f"{who} has {len(part)} entries; it must be a pair of arrays (x, y): all inputs in one array, all targets "
            "in another"
        )
    x, y = (as_tensor(array, f"{what} of {who}") for what, array in zip(("inputs", "targets"), part, strict=True))
    if len(x) != len(y):
        raise EquipoiseError(f"{who} has {len(x)} inputs and {len(y)} targets; the numbers must be equal")
    return x, y if y.is_floating_point() else y.long()


def _is_table(value: Any) -> bool:
    return type(value).__name__ == _TABLES


def _type(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def _columns(dataset: Any, who: str) -> tuple[Any, Any]:
    """Return the inputs and the targets of a Dataset."""
    if not len(dataset):
        raise EquipoiseError(f"{who} has no samples; give it some, or leave it out")
    if isinstance(dataset, (str, bytes, Mapping)):
        raise EquipoiseError(f"{who} is {_type(dataset)}; it must be a pair of arrays (x, y)")
    samples = []
    for i in range(len(dataset)):
        try:
            sample = dataset[i]
        except Exception as error:  # whatever the user's Dataset raises
            raise EquipoiseError(
                f"{who} is a {type(dataset).__name__} that fails at sample {i}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            parts = f"{len(sample)} parts" if isinstance(sample, (tuple, list)) else f"the type {type(sample).__name__}"
            raise EquipoiseError(
                f"a sample of {who} has {parts}; it must be a pair (x, y), so join several inputs to one tensor"
            )
        samples.append(sample)
    columns = []
    for k, what in enumerate(("inputs", "targets")):
        try:
            columns.append(torch.stack([torch.as_tensor(sample[k]) for sample in samples]))
        except (TypeError, ValueError, RuntimeError) as error:
            raise EquipoiseError(
                f"the {what} of {who} cannot be stacked to one tensor: {error}; the Dataset must return numbers or "
                "tensors of one shape"
            ) from None
    return columns[0], columns[1]


def as_tensor(array: Any, what: str) -> Tensor:
    """Return an array of numbers as a tensor on the CPU, outside of autograd.

    Args:
        array: a tensor, or anything that numpy makes an array of.
        what: what it is, in the plural, for error messages.
    """
    if array is None:
        raise EquipoiseError(f"the {what} are None; they must be an array with one row per sample")
    try:
        if isinstance(array, (list, tuple)) and array and all(isinstance(each, Tensor) for each in array):
            array = torch.stack(list(array))
        tensor = array.detach().cpu() if isinstance(array, Tensor) else _from_numpy(np.asarray(array), what)
    except EquipoiseError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise EquipoiseError(f"the {what} are not an array of numbers: {error}") from None
    if tensor.ndim == 0:
        raise EquipoiseError(_single(what))
    if tensor.is_complex():
        raise EquipoiseError(f"the {what} are complex numbers; give real and imaginary parts as two features")
    return tensor


def _single(what: str) -> str:
    return f"the {what} are a single value; they must be an array with one row per sample"


def _from_numpy(array: np.ndarray, what: str) -> Tensor:
    if array.dtype.kind in _KINDS and array.dtype.kind != "c":
        advice = (
            "number the classes from 0"
            if what.startswith("targets")
            else "convert them to numbers, for example with .astype('float32')"
        )
        raise EquipoiseError(f"the {what} are {_KINDS[array.dtype.kind]} (dtype {array.dtype}); {advice}")
    if array.ndim == 0:
        raise EquipoiseError(_single(what))
    dtype = array.dtype.newbyteorder("=")
    array = np.ascontiguousarray(array, _WIDER.get(dtype.name, dtype))
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def named_clients(clients: Any, names: Any) -> tuple[list[str], list[Any]]:
    """Return the names of the clients, and their entries, as `from_clients` gets them."""
    if isinstance(clients, Mapping):
        if "train" in clients and set(clients) <= set(SPLITS):
            raise EquipoiseError(
                f"clients has the keys {sorted(clients)}, which are the parts of one client's samples; give a list "
                "with one such dictionary per client, or a dictionary of them by the clients' names"
            )
        if names is not None:
            raise EquipoiseError("the keys of clients are their names already; leave names= out, or give a list")
        names, clients = list(clients), list(clients.values())
        number = next((name for name in names if isinstance(name, Integral)), None)
        if number is not None and names != list(range(len(names))):
            raise EquipoiseError(
                f"clients has the number {number!r} as a key, which results would take for a position; use strings as "
                f"names, such as {str(number)!r}"
            )
    elif isinstance(clients, (tuple, list)) and len(clients) == 2 and all(map(is_array, clients)):
        raise EquipoiseError("clients is one pair (x, y); give a list with one pair per client, such as [(x, y)]")
    elif is_array(clients) or isinstance(clients, (str, bytes, DataLoader)) or not hasattr(clients, "__iter__"):
        raise EquipoiseError(
            f"clients is of type {type(clients).__name__}; it must be a list with one (x, y) or Dataset per client, "
            "a dictionary of them by name, or a Federation"
        )
    clients = list(clients)
    if not clients:
        raise EquipoiseError("the list of clients is empty; give at least one (x, y)")
    if isinstance(names, str):
        raise EquipoiseError(f"names = {names!r} is not allowed; it must be a list with one name per client")
    names = numbered(len(clients)) if names is None else [str(name) for name in names]
    if len(names) != len(clients):
        raise EquipoiseError(f"there are {len(clients)} clients and {len(names)} names; give one name per client")
    return names, clients
