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
    "representations of a term's probes, if they are computed for many batches at once"


def steps_in_epoch(n: int, batch: int, least: int = 1) -> int:
    """Return the number of batches in a pass over n samples; a last batch of fewer than `least` samples is dropped.

    A client with fewer samples than a batch has one batch of all of them.
    """
    full, rest = divmod(n, batch)
    return full + (rest > 0 and (rest >= least or not full))


def batch_indices(
    n: int, batch: int, epochs: int, steps: int | None, rng: torch.Generator | None, least: int = 1
) -> np.ndarray:
    """Assign samples to steps.

    Args:
        n: number of samples.
        batch: batch size.
        epochs: passes over the samples, each in a new random order.
        steps: number of batches, in place of epochs.
        rng: source of the random order; without it all samples come once, in their order.
        least: the last batch of a shuffled epoch is dropped if it has fewer samples.

    Returns:
        A (steps, batch) matrix of sample numbers, -1 where a batch is not full.
    """
    if n == 0:
        return np.empty((0, batch), dtype=np.int64)
    if rng is None:
        return np.pad(np.arange(n), (0, -n % batch), constant_values=-1).reshape(-1, batch)
    in_epoch = steps_in_epoch(n, batch, least)
    total = epochs * in_epoch if steps is None else steps
    epochs = -(-total // in_epoch)
    order = np.full((epochs, in_epoch * batch), -1, dtype=np.int64)
    for row in order:
        shuffled = torch.randperm(n, generator=rng).numpy()[: len(row)]
        row[: len(shuffled)] = shuffled
    return order.reshape(-1, batch)[:total]


def batch_order(seed: int, round: int, name: str, purpose: str, stream: int | None) -> torch.Generator | None:
    """Return the generator of a client's random batch order in a round, or None for no shuffling."""
    if stream is None:
        return None
    return randomness.torch_generator(seed, purpose, round, name, stream)
