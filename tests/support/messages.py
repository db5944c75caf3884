"""Messages for tests of what goes over the wire."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

ALLOWED = {
    "up.w": ((3,), torch.float32),
    "up.m": ((2, 2), torch.float64),
    "up.n": ((1,), torch.int64),
    "up.none": ((0,), torch.float32),
}


RUN = "0123456789abcdef" * 2


examples = settings(max_examples=100, derandomize=True)


def tensors_of(numbers: bytes) -> dict[str, Tensor]:
    """Tensors of the allowed kinds, whose numbers are these bytes: NaN, infinities and all."""
    made = {}
    for name, (shape, dtype) in ALLOWED.items():
        count = torch.Size(shape).numel()
        taken, numbers = numbers[: count * dtype.itemsize], numbers[count * dtype.itemsize :]
        made[name] = torch.frombuffer(bytearray(taken), dtype=dtype).reshape(shape) if count else torch.empty(shape)
    return made


NUMBERS = 12 + 32 + 8


def bits(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (t.dtype, tuple(t.shape), t.contiguous().numpy().tobytes()) for name, t in tensors.items()}


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
json_values = plain | st.lists(plain, max_size=2) | st.dictionaries(st.text(max_size=4), plain, max_size=2)


class Burglar:
    """Runs a program when it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.trace.touch, ()
