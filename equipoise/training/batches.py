"""Assignment of a client's samples to the batches of its local training."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise import randomness


class Batch(NamedTuple):
    """The samples of one step."""

    x: Tensor
    y: Tensor
    weights: Tensor | None = None
    "weights of the samples, if the batch is padded"
    rows: Tensor | None = None
    "indices of the samples among the client's own"
    probed: tuple[Tensor, ...] = ()
    "representations of a term's probe, if they are computed for many batches at once"


def batch_indices(n: int, batch: int, epochs: int, steps: int | None, rng: torch.Generator | None) -> np.ndarray:
    """Assign samples to steps.

    Args:
        n: number of samples.
        batch: batch size.
        epochs: passes over the samples, each in a new random order.
        steps: number of batches, in place of epochs.
        rng: source of the random order; without it all samples come once, in their order.

    Returns:
        A (steps, batch) matrix of sample numbers, -1 where a batch is not full.
    """
    if n == 0:
        return np.empty((0, batch), dtype=np.int64)
    if rng is None:
        return np.pad(np.arange(n), (0, -n % batch), constant_values=-1).reshape(-1, batch)
    in_epoch = -(-n // batch)
    total = epochs * in_epoch if steps is None else steps
    epochs = -(-total // in_epoch)
    order = np.full((epochs, in_epoch * batch), -1, dtype=np.int64)
    for row in order:
        row[:n] = torch.randperm(n, generator=rng).numpy()
    return order.reshape(-1, batch)[:total]


def batch_order(seed: int, round: int, name: str, purpose: str, stream: int | None) -> torch.Generator | None:
    """Return the generator of a client's random batch order in a round, or None for no shuffling."""
    if stream is None:
        return None
    return randomness.torch_generator(seed, purpose, round, name, stream)
