"""Files with one trained model, and with what is needed to load it again."""

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

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
    described = {
        "shape": list(shape),
        "outputs": outputs,
        "dtype": experiment.engine.dtype,
        "trained": {"algorithm": experiment.algorithm_name, "data": title, "of": of},
    }
    if experiment.model is not None:
        described["model"] = {"name": experiment.model_name, **experiment.model.table()}
    metadata = {"format": _FORMAT, "equipoise": json.dumps(described)}
    tensor_files.write_tensors(path, {k: t.clone() for k, t in module.state_dict().items()}, metadata)


def load_model(path: str | Path) -> nn.Module:
    """Load a module that `equipoise export` wrote, in eval mode."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise EquipoiseError(f"{path} was not written by equipoise export")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise EquipoiseError(f"{path} cannot be read as a model: {error}") from None
    described = json.loads(metadata["equipoise"])
    if "model" not in described or is_own_code(described["model"]["name"]):  # a file must not name code to run
        raise EquipoiseError(
            f"{path} holds a custom model: build its module yourself, and load into it the tensors that "
            "safetensors.torch.load_file reads from the file"
        )
    settings = described["model"]
    model = choose(MODELS, settings, "model")[1]
    module = model.build(tuple(described["shape"]), described["outputs"])
    module.to(next(iter(tensors.values())).dtype).load_state_dict(tensors)
    return module.eval()
