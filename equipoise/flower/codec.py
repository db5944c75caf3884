"""Messages as safetensors bytes, which are checked before any tensor is created."""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from equipoise.algorithms.schema import Shapes
from equipoise.state import State
from equipoise.storage.tensor_files import DTYPES

_FACTS = "equipoise"
_LONGEST = 500  # characters of the reason
_HEADER = 1 << 16  # most bytes of a header: names and shapes of a few tensors, and some numbers


class RejectedMessage(Exception):
    """A message that is not allowed; `reason` is the word under which it is counted."""

    def __init__(self, reason: str, text: str):
        super().__init__(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}...")
        self.reason = reason


def pack(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Return tensors and facts as the bytes of a message."""
    # Copies, because safetensors refuses tensors that share memory: the model may be both message and start.
    return save({name: t.contiguous().clone() for name, t in tensors.items()}, {_FACTS: json.dumps(dict(facts))})


def unpack(blob: bytes, allowed: Shapes) -> tuple[State, dict[str, Any]]:
    """Return the tensors and the facts of a message, or raise RejectedMessage if it holds a tensor that is not allowed.

    Names, shapes and types are compared before any tensor is created.
    """
    most = 8 + _HEADER + sum(math.prod(shape) * dtype.itemsize for shape, dtype in allowed.values())
    if len(blob) > most:
        raise RejectedMessage("oversize", f"{len(blob)} bytes, but at most {most} are expected")
    header = _header(blob)
    metadata = header.pop("__metadata__", None)
    for name, entry in header.items():
        if name not in allowed:
            raise RejectedMessage("shape", f"it contains {name!r}, which is not expected")
        found = _shape(entry)
        if found != allowed[name]:
            raise RejectedMessage("shape", f"{name} is {_words(found)}, but {_words(allowed[name])} is expected")
    try:
        facts = json.loads(metadata[_FACTS]) if isinstance(metadata, dict) else None
        if not isinstance(facts, dict):
            raise RejectedMessage("malformed", "it has no facts")
        return State(load(blob)), facts
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RejectedMessage("malformed", f"it is not valid safetensors ({type(error).__name__})") from None


def _header(blob: bytes) -> dict[str, Any]:
    if len(blob) < 8:
        raise RejectedMessage("malformed", "it is too short to be a message")
    (length,) = struct.unpack("<Q", blob[:8])
    if length > min(_HEADER, len(blob) - 8):
        raise RejectedMessage("malformed", "its header is too long")
    try:
        header = json.loads(blob[8 : 8 + length])
    except (ValueError, RecursionError):
        raise RejectedMessage("malformed", "its header is not JSON") from None
    if not isinstance(header, dict):
        raise RejectedMessage("malformed", "its header is not a JSON object")
    return header


def _shape(entry: Any) -> tuple[tuple[int, ...], Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
        raise RejectedMessage("malformed", "its header does not give shapes")
    return tuple(entry["shape"]), DTYPES.get(str(entry.get("dtype")))


def _words(described: tuple[tuple[int, ...], Any]) -> str:
    shape, dtype = described
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def group(state: Mapping[str, Tensor], prefix: str) -> State:
    """Return the tensors whose names begin with `prefix` and a dot, under the rest of their names."""
    return State({k.removeprefix(f"{prefix}."): t for k, t in state.items() if k.startswith(f"{prefix}.")})


def named(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries with `prefix` and a dot before their names: the reverse of `group`."""
    return {f"{prefix}.{k}": value for k, value in state.items()}
