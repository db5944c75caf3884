"""Predictions of a model for arrays of any kind, and clients by number or name."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.data.samples import as_tensor
from equipoise.errors import EquipoiseError
from equipoise.quantiles import Pinball


def client_number(names: Sequence[str], client: Any) -> int:
    """Return the number of a client that is given by its number (of any integer type) or by its name."""
    if isinstance(client, str) and client in names:
        return list(names).index(client)
    if isinstance(client, Integral) and not isinstance(client, bool) and 0 <= int(client) < len(names):
        return int(client)
    raise EquipoiseError(
        f"there is no client {client!r}; clients are 0 to {len(names) - 1}, or by name, such as {names[0]!r}"
    )


@torch.no_grad()
def predict(
    module: nn.Module, x: Any, shape: Sequence[int], dtype: torch.dtype, batch: int, pinball: Pinball | None = None
) -> Any:
    """Return the outputs of a module in eval mode.

    Args:
        module: the module.
        x: inputs, one row per sample: a tensor, or anything that numpy makes an array of.
        shape: shape of one sample in training.
        dtype: number format of the module.
        batch: number of samples per pass.
        pinball: the quantiles that the outputs are, if they are; those that cross are sorted.

    Returns:
        A tensor for a tensor, else a numpy array.
    """
    inputs = as_tensor(x, "inputs")
    if inputs.ndim != len(shape) + 1:
        raise EquipoiseError(
            f"the inputs have the shape {tuple(inputs.shape)}; there must be one row of shape {tuple(shape)} per sample"
        )
    if not isinstance(batch, Integral) or batch < 1:
        raise EquipoiseError(f"batch = {batch!r} is not allowed; it must be a whole number >= 1")
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    try:
        parts = [module.eval()(part) for part in inputs.split(int(batch))]
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise EquipoiseError(f"the model does not take inputs of shape {tuple(inputs.shape[1:])}: {error}") from None
    outputs = torch.cat(parts)
    if pinball is not None:
        outputs = pinball.ordered(outputs).flatten(1)
    return outputs if isinstance(x, Tensor) else np.asarray(outputs)
