"""Files with one trained model, and with what is needed to load it again."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from equipoise.config.experiment import Experiment
from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from equipoise.registry import choose, is_own_code
from equipoise.storage import tensor_files

_FORMAT = "equipoise-model-1"


def write_model(
    path: Path, module: nn.Module, experiment: Experiment, shape: Sequence[int], outputs: int, title: str, of: str
) -> None:
    """Write the parameters and buffers of a module to a file.

    For a model of the library the file also has all that `load_model` needs to build it again.

    Args:
        path: the file.
        module: the trained module.
        experiment: the experiment that it was trained in.
        shape: shape of one input.
        outputs: number of outputs.
        title: name of the data.
        of: which model it is, for readers.
    """
    described: dict[str, Any] = {
        "shape": list(shape),
        "outputs": outputs,
        "dtype": str(experiment.engine.dtype).removeprefix("torch."),
        "trained": {"algorithm": experiment.algorithm_name, "data": title, "of": of},
    }
    if experiment.model is not None:
        described["model"] = {"name": experiment.model_name, **experiment.model.table()}
    write_tensors_of_model(path, {k: t.clone() for k, t in module.state_dict().items()}, described)


def write_tensors_of_model(path: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    """Write the parameters and buffers of a model to a file, with a description of the model."""
    tensor_files.write_tensors(path, tensors, {"format": _FORMAT, "equipoise": json.dumps(described)})


def load_model(path: str | Path, module: nn.Module | None = None) -> nn.Module:
    """Load a trained model from a file, in eval mode.

    Args:
        path: a file that `equipoise export` or `Result.save` wrote, or the personal.safetensors or global.safetensors
            of a deployment.
        module: for a model of your own, a module like the one that was trained; it is copied, and its own weights do
            not matter. A model of the library is built from the file alone.

    Returns:
        The module.
    """
    if not isinstance(path, (str, Path)) or Path(path).is_dir():
        raise EquipoiseError(f"{path} is not a file; name the .safetensors file of one model")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise EquipoiseError(f"{path} was not written by equipoise export{_instead(metadata)}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise EquipoiseError(f"{path} cannot be read as a model: {error}") from None
    described = json.loads(metadata["equipoise"])
    if module is not None:
        module = copy.deepcopy(checked_module(module))
    elif "model" in described and not is_own_code(described["model"]["name"]):  # a file must not name code to run
        model = choose(MODELS, described["model"], "model")[1]
        module = model.build(tuple(described["shape"]), described["outputs"])
    else:
        raise EquipoiseError(
            f"{path} holds a model of your own; give the module: load_model({str(path)!r}, module=Net())"
        )
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    load_tensors(module.to(dtype), tensors, str(path))
    return module.eval()


def _instead(metadata: Mapping[str, str]) -> str:
    if not metadata.get("format", "").startswith("equipoise-models"):
        return ""
    return ": it holds all models of a run, so load its folder with equipoise.load_result"


def checked_module(module: Any) -> nn.Module:
    """Return the module, or raise an error if it is something else, such as a class."""
    if isinstance(module, nn.Module):
        return module
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise EquipoiseError(f"module is the class {module.__name__}; create a module of it: {module.__name__}(...)")
    raise EquipoiseError(f"module is of type {type(module).__name__}; it must be a torch nn.Module")


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy tensors into the parameters and buffers of a module, or raise an error that names the first that differs.

    Args:
        module: the module.
        tensors: parameters and buffers by name.
        source: where the tensors are from, for error messages.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    places = {**parameters, **dict(module.named_buffers(remove_duplicate=False))}
    saved_buffers = {name for name in module.state_dict() if name not in parameters}
    needed = [*dict(module.named_parameters()), *(n for n, _ in module.named_buffers() if n in saved_buffers)]
    for name in needed:
        if name not in tensors:
            more = next((other for other in tensors if other not in places), None)
            raise EquipoiseError(
                f"the module does not fit {source}: it has {name!r} of shape {list(places[name].shape)}, which is not "
                f"in the file{f'; the file has {more!r}' if more else ''}"
            )
        if places[name].shape != tensors[name].shape:
            raise EquipoiseError(
                f"the module does not fit {source}: its {name!r} has the shape {list(places[name].shape)}, and "
                f"{list(tensors[name].shape)} in the file"
            )
    for name, tensor in tensors.items():
        if name not in places:
            raise EquipoiseError(
                f"the module does not fit {source}: the file has {name!r} of shape {list(tensor.shape)}, and the "
                "module has not"
            )
        places[name].copy_(tensor)
