"""Files with one trained model, and with what is needed to load it again."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from equipoise.config.experiment import Experiment
from equipoise.data.series_scale import SeriesScale
from equipoise.engine.described_modules import described_own_modules, with_described_modules
from equipoise.engine.unscaled import Unscaled
from equipoise.errors import EquipoiseError, first_line
from equipoise.models import MODELS
from equipoise.models.base import ModelSettings
from equipoise.quantiles import Pinball
from equipoise.registry import choose, is_own_code
from equipoise.settings import MOST, read
from equipoise.storage import tensor_files
from equipoise.storage.tensor_files import read_header

_FORMAT = "equipoise-model-1"
_LONGEST = 1 << 16  # characters of a description


def write_model(
    path: Path,
    module: nn.Module,
    experiment: Experiment,
    shape: Sequence[int],
    outputs: int,
    title: str,
    of: str,
    series: Mapping[str, Any] | None = None,
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
        series: what `described_series` returned, for a model of time series.
    """
    described: dict[str, Any] = {
        "shape": list(shape),
        "outputs": outputs,
        "dtype": str(experiment.engine.dtype).removeprefix("torch."),
        "trained": {"algorithm": experiment.algorithm_name, "data": title, "of": of},
        **(series or {}),
    }
    if experiment.model is not None:
        described["model"] = {"name": experiment.model_name, **experiment.model.table()}
    described |= described_own_modules(experiment.algorithm, experiment.head)
    write_tensors_of_model(path, {k: t.clone() for k, t in module.state_dict().items()}, described)


def write_tensors_of_model(path: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    """Write the parameters and buffers of a model to a file, with a description of the model."""
    tensor_files.write_tensors(path, tensors, {"format": _FORMAT, "equipoise": json.dumps(described)})


def load_model(path: str | Path, module: nn.Module | None = None, *, own_unit: bool = False) -> nn.Module:
    """Load a trained model from a file, in eval mode.

    Args:
        path: a file that `equipoise export` or `Result.save` wrote, or the personal.safetensors or global.safetensors
            of a deployment.
        module: for a model of your own, a module like the one that was trained; it is copied, and its own weights do
            not matter. A model of the library is built from the file alone.
        own_unit: for a client's model of time series, whether its forecasts are to be in the data's own unit; the
            module then is an `Unscaled`.

    Returns:
        The module.
    """
    if not isinstance(path, (str, Path)) or Path(path).is_dir():
        raise EquipoiseError(f"{path} is not a file; name the .safetensors file of one model")
    header = read_header(Path(path), "a model")
    if header.metadata.get("format") != _FORMAT:
        raise EquipoiseError(f"{path} was not written by equipoise export{_instead(header.metadata)}")
    described = _description(path, header.metadata)
    if module is not None:
        module = with_described_modules(path, checked_module(module), described)
        check_tensors(module, header.tensors, str(path))
        module = copy.deepcopy(module)
    elif "model" in described and not is_own_code(described["model"].get("name")):  # a file must not name code to run
        model = choose(MODELS, described["model"], "model")[1]
        with_own = partial(with_described_modules, path, described=described)
        module = build_like(model, described["shape"], described["outputs"], header.tensors, str(path), with_own)
    else:
        raise EquipoiseError(
            f"{path} holds a model of your own; give the module: load_model({str(path)!r}, module=Net())"
        )
    dtype = next((dtype for _, dtype in header.tensors.values() if dtype.is_floating_point), torch.float32)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise EquipoiseError(f"{path} cannot be read as a model: {first_line(error)}") from None
    load_tensors(module.to(dtype), tensors, str(path))
    return _unscaled(path, module, described).eval() if own_unit else module.eval()


def _unscaled(path: str | Path, module: nn.Module, described: Mapping[str, Any]) -> Unscaled:
    """Return the module with the scale that its file describes."""
    if not isinstance(described.get("series"), dict):
        raise EquipoiseError(
            f"{path} has no scale of a time series: only a client's own file of a model that was trained on one has; "
            "leave out own_unit"
        )
    quantiles = described.get("quantiles")
    return Unscaled(module, read(SeriesScale, described["series"], "series"), Pinball(quantiles) if quantiles else None)


def _description(path: str | Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of the model in a file, of which everything is checked that is needed to build it."""
    try:
        text = metadata.get("equipoise", "")
        described = json.loads(text) if len(text) <= _LONGEST else None
    except (ValueError, RecursionError):
        described = None
    if not isinstance(described, dict):
        raise EquipoiseError(f"{path} cannot be read as a model: it has no description; export the model again")
    if "model" not in described:
        return described
    model, shape, outputs = (described.get(key) for key in ("model", "shape", "outputs"))
    if not isinstance(model, dict) or not isinstance(shape, list) or not all(map(_is_size, [outputs, *shape])):
        raise EquipoiseError(
            f"{path} cannot be read as a model: its description names no model, shape and number of outputs; export "
            "the model again"
        )
    return described


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST


def build_like(
    model: ModelSettings,
    shape: Sequence[int],
    outputs: int,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    source: str,
    with_own: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> nn.Module:
    """Build a model, after checking without any memory for it that it has the tensors of a file.

    Args:
        model: the settings of the model.
        shape: shape of one input.
        outputs: number of outputs.
        tensors: shapes and number formats of the tensors in the file.
        source: the file, for error messages.
        with_own: puts an algorithm's own modules into the model.
    """
    try:
        with torch.device("meta"):
            planned = with_own(model.build(tuple(shape), outputs))
    except EquipoiseError:
        raise
    except Exception as error:  # settings that are allowed one by one may be impossible together, such as their product
        raise EquipoiseError(f"{source} describes a model that cannot be built: {first_line(error)}") from None
    check_tensors(planned, tensors, source)
    return with_own(model.build(tuple(shape), outputs))


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


def check_tensors(
    module: nn.Module, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], source: str
) -> dict[str, Tensor]:
    """Raise an error that names the first tensor of a file that is not one of the module's.

    Args:
        module: the module, which may be on the meta device.
        tensors: shapes and number formats of the file's tensors.
        source: the file, for error messages.

    Returns:
        The parameters and buffers of the module by name.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    places = {**parameters, **dict(module.named_buffers(remove_duplicate=False))}
    saved_buffers = {name for name in module.state_dict() if name not in parameters}
    needed = [*dict(module.named_parameters()), *(n for n, _ in module.named_buffers() if n in saved_buffers)]
    for name in [*needed, *tensors]:
        if name not in tensors:
            more = next((other for other in tensors if other not in places), None)
            raise EquipoiseError(
                f"the module does not fit {source}: it has {name!r} of shape {list(places[name].shape)}, which is not "
                f"in the file{f'; the file has {more[:80]!r}' if more else ''}"
            )
        shape, dtype = tensors[name]
        if name not in places:
            raise EquipoiseError(
                f"the module does not fit {source}: the file has {name[:80]!r} of shape {list(shape)}, and the module "
                "has not"
            )
        if tuple(places[name].shape) != tuple(shape):
            raise EquipoiseError(
                f"the module does not fit {source}: its {name!r} has the shape {list(places[name].shape)}, and "
                f"{list(shape)} in the file"
            )
        here = places[name].dtype
        if here != dtype and not (here.is_floating_point and dtype.is_floating_point):
            raise EquipoiseError(
                f"the module does not fit {source}: its {name!r} has numbers of type {_word(here)}, and {_word(dtype)} "
                "in the file"
            )
    return places


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy tensors into the parameters and buffers of a module, or raise an error that names the first that differs.

    Args:
        module: the module.
        tensors: parameters and buffers by name.
        source: where the tensors are from, for error messages.
    """
    places = check_tensors(module, {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, source)
    for name, tensor in tensors.items():
        places[name].copy_(tensor)
