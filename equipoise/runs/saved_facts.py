"""What models.safetensors says of a run, which is checked against the tensors in the file before they are read."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from equipoise.data.series_scale import SeriesScale
from equipoise.errors import EquipoiseError, first_line
from equipoise.quantiles import checked_quantiles
from equipoise.settings import MOST, Settings, read
from equipoise.storage.tensor_files import TensorHeader

Size = Annotated[int, Field(ge=0, le=MOST)]
Samples = tuple[
    tuple[Size, ...],
    Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"],
]


class ModelFacts(Settings):
    """The facts about a run that its models are read with."""

    clients: tuple[str, ...]
    unseen: tuple[str, ...]
    rounds: Size
    method: str
    looks_up: bool
    title: str
    columns: tuple[str, ...]
    parameters: tuple[tuple[str, tuple[Size, ...]], ...]
    body_size: Annotated[int, Field(ge=0)]
    head: str | tuple[str, ...] | None = None
    buffers: tuple[str, ...]
    inputs: Samples
    targets: Samples
    outputs: Annotated[int, Field(ge=1, le=MOST)]
    dtype: Literal["float32", "float64"]
    loss: str | None
    quantiles: tuple[float, ...] | None = None
    metrics: tuple[str, ...] | None
    scales: tuple[SeriesScale | None, ...] | None = None
    training_clients: Annotated[int, Field(ge=0)]
    training_samples: Annotated[int, Field(ge=0)] | None = None
    origin: dict[str, Any]


def read_facts(path: Path, header: TensorHeader) -> dict[str, Any]:
    """Return the facts of a file, or raise an error if they are incomplete or do not fit its tensors.

    Args:
        path: the file, for error messages.
        header: its header.
    """
    try:
        found = json.loads(header.metadata.get("equipoise", ""))
        if not isinstance(found, dict):
            raise ValueError("its description is not a JSON object")
        facts = read(ModelFacts, {k: v for k, v in found.items() if k in ModelFacts.model_fields}, "models")
        _compare(facts, header.tensors)
    except RecursionError:
        raise EquipoiseError(f"{path} cannot be read: its description is nested too deeply") from None
    except (ValueError, EquipoiseError) as error:
        raise EquipoiseError(f"{path} cannot be read: {first_line(error)}") from None
    return found


def _compare(facts: ModelFacts, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Raise ValueError if the tensors are not those that the facts speak of."""
    clients, columns = len(facts.clients), len(facts.columns)
    if facts.scales is not None and len(facts.scales) != clients:
        raise ValueError(f"it has the scales of {len(facts.scales)} time series for {clients} clients")
    if facts.quantiles is not None:
        checked_quantiles(facts.quantiles)
    size = sum(prod(shape) for _, shape in facts.parameters)
    for name in ("choices", "owners", *(f"module.{name}" for name in facts.buffers)):
        if name not in tensors:
            raise ValueError(f"it has no tensor {name[:80]!r}")
    for name, shape in facts.parameters:
        if f"module.{name}" in tensors and tensors[f"module.{name}"][0] != shape:
            raise ValueError(f"the parameter {name[:80]!r} has two shapes")
    kept = sum(prod(tensors[f"module.{name}"][0]) for name in facts.buffers)
    owners = prod(tensors["owners"][0])
    expected = {
        "choices": (clients,),
        "owners": (owners,),
        "global": (size,),
        "global_buffers": (kept,),
        "personal": (owners, size),
        "personal_buffers": (owners, kept),
        "client_buffers": (clients, kept),
        **{name: (clients, columns) for name in tensors if name.startswith("scores.")},
    }
    for name, wanted in expected.items():
        if name in tensors and tensors[name][0] != wanted:
            raise ValueError(f"{name!r} has the shape {list(tensors[name][0])}, not {list(wanted)}")
    for name in ("personal", "personal_buffers", "client_buffers", "global", "global_buffers"):
        if name in tensors and not tensors[name][1].is_floating_point:
            raise ValueError(f"{name!r} has whole numbers")
    if tensors["owners"][1] != torch.int64 or tensors["choices"][1] != torch.int8:
        raise ValueError("'owners' or 'choices' has another number format")
    needed = [*(["personal"] if owners else []), *(["client_buffers"] if kept else [])]
    for name in [*needed, *(["personal_buffers"] if kept and owners else [])]:
        if name not in tensors:
            raise ValueError(f"it has no tensor {name!r}")
