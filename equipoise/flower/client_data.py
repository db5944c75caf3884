"""A client's data: arrays in safetensors or npz files, or what the user's Python function returns."""

import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from equipoise.data.federation import SPLITS, Federation, from_clients
from equipoise.errors import EquipoiseError
from equipoise.flower.deployment_plan import DeploymentPlan
from equipoise.storage.tensor_files import write_tensors

DataFunction = Callable[[Mapping[str, Any]], Any]
"""A function that gets the client's settings and returns (x, y), a torch Dataset, or a dictionary of train, validation
and test."""

# What numpy, zipfile and safetensors raise for damaged files.
_DAMAGED: tuple[type[Exception], ...] = (OSError, ValueError, TypeError, EOFError, NotImplementedError, RuntimeError)
_DAMAGED += (SafetensorError, zipfile.BadZipFile, zlib.error)
_SUFFIXES = (".safetensors", ".npz")
_NAMES = "x and y, or train.x and train.y, and optionally validation.x, validation.y, test.x and test.y"


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a file, or of all files of a folder; x in train.npz is returned as train.x."""
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES)
        if not found:
            raise EquipoiseError(f"{path} has no data: put a .safetensors or .npz file there, with {_NAMES}")
        arrays: dict[str, Tensor] = {}
        for file in found:
            prefix = f"{file.stem}." if file.stem in SPLITS else ""
            for name, array in _read_file(file).items():
                if prefix + name in arrays:
                    raise EquipoiseError(f"{path} has {prefix + name} twice; keep one of its files")
                arrays[prefix + name] = array
        return arrays
    if path.suffix not in _SUFFIXES:
        raise EquipoiseError(f"{path} is not a folder, nor a .safetensors or .npz file")
    return _read_file(path)


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with np.load(path, allow_pickle=False) as arrays:  # never pickle: it could run code
            return {name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in arrays.files}
    except FileNotFoundError:
        raise EquipoiseError(f"there is no file {path}") from None
    except _DAMAGED as error:
        raise EquipoiseError(f"{path} cannot be read as arrays: {error}") from None


def _parts(arrays: dict[str, Tensor], path: Path) -> Any:
    """Return the arrays in the form that `from_clients` takes."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for prefix in ("", *SPLITS):
        x, y = (f"{prefix}.{k}" if prefix else k for k in ("x", "y"))
        if (x in arrays) != (y in arrays):
            raise EquipoiseError(f"{path} has only one of {x} and {y}; both are needed")
        if x in arrays:
            pairs[prefix] = arrays.pop(x), arrays.pop(y)
    if arrays:
        raise EquipoiseError(f"{path} has {', '.join(sorted(arrays))}; the arrays must be {_NAMES}")
    if "" in pairs and len(pairs) > 1:
        raise EquipoiseError(f"{path} has both undivided samples and divided ones; the arrays must be {_NAMES}")
    if "" not in pairs and "train" not in pairs:
        raise EquipoiseError(f"{path} has no training samples; the arrays must be {_NAMES}")
    return pairs.get("", pairs)


def client_data(
    plan: DeploymentPlan, name: str, settings: Mapping[str, Any], hook: DataFunction | None = None
) -> Federation:
    """Return the client's data as a federation of one client, checked against the section [deploy].

    Args:
        plan: what the deployment does.
        name: the client's name.
        settings: the client's settings; `data` is the folder or file, where there is no hook.
        hook: the user's function that returns the data, if there is one.
    """
    if hook is not None:
        given, where = hook(settings), f"the data of {name}"
        if given is None or isinstance(given, (str, bytes, int, float)):
            raise EquipoiseError(
                f"{where}: the function data() of app.py returned {type(given).__name__}; it must return (x, y), "
                'a Dataset, or a dictionary of "train", "validation" and "test"'
            )
    else:
        path = settings.get("data")
        if not isinstance(path, str) or not path:
            raise EquipoiseError("the client's settings do not say where its data are: set data = '/path/to/folder'")
        given, where = _parts(read_arrays(Path(path).expanduser()), Path(path)), path
    seed = plan.experiment.schedule.seed
    federation = from_clients([given], names=[name], split=plan.split, seed=seed)
    return _checked(plan, federation, where)


def _checked(plan: DeploymentPlan, federation: Federation, where: str) -> Federation:
    x, y = plan.sample()
    deploy = plan.experiment.deploy
    if federation.x.shape[1:] != x.shape[1:]:
        raise EquipoiseError(
            f"{where}: samples have the shape {list(federation.x.shape[1:])}, but the experiment says "
            f"deploy.shape = {list(x.shape[1:])}"
        )
    if federation.y.shape[1:] != y.shape[1:]:
        raise EquipoiseError(
            f"{where}: targets have the shape {list(federation.y.shape[1:])}, but the experiment says "
            f"deploy.target_shape = {list(y.shape[1:])}"
        )
    for what, array, wanted in (("inputs", federation.x, x), ("targets", federation.y, y)):
        if array.is_floating_point() != wanted.is_floating_point():
            kinds = ("whole numbers", "fractional numbers")
            raise EquipoiseError(
                f"{where}: {what} are {kinds[array.is_floating_point()]}, but the experiment says they are "
                f"{kinds[wanted.is_floating_point()]} (deploy.inputs, deploy.targets)"
            )
        if array.is_floating_point() and not torch.isfinite(array).all():
            raise EquipoiseError(f"{where}: there is NaN or infinity in the {what}; remove those samples")
    if plan.classes is not None:
        low, high = int(federation.y.min()), int(federation.y.max())
        if low < 0 or high >= plan.classes:
            raise EquipoiseError(
                f"{where}: labels go from {low} to {high}, but with deploy.outputs = {deploy.outputs} they must be "
                f"0 to {plan.classes - 1}"
            )
    return replace(federation, classes=plan.classes)


def write_client(path: Path, federation: Federation, who: int) -> None:
    """Write one client's samples of a federation as a data file."""
    arrays = {}
    for split in SPLITS:
        indices = getattr(federation, split)[who]
        if len(indices):
            arrays[f"{split}.x"], arrays[f"{split}.y"] = federation.gather(torch.from_numpy(indices))
    write_tensors(path, arrays)
