"""Assignment of a client's samples to the batches of its local training."""

from collections.abc import Sequence
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


class Draw(NamedTuple):
    """How batches are drawn that are not those of `descend`."""

    size: int | None = None
    "number of samples in a batch; None for the algorithm's own"
    portion: float = 1.0
    "share of the samples that a pass sees"
    per_step: int = 1
    "number of batches in a step, each from an order of its own"


ORDINARY = Draw()
"""As `descend` draws them."""


def steps_in_epoch(n: int, batch: int, least: int = 1) -> int:
    """Return the number of batches in a pass over n samples; a last batch of fewer than `least` samples is dropped.

    A client with fewer samples than a batch has one batch of all of them.
    """
    full, rest = divmod(n, batch)
    return full + (rest > 0 and (rest >= least or not full))


def batch_indices(
    n: int,
    batch: int,
    epochs: int,
    steps: int | None,
    rng: torch.Generator | None,
    least: int = 1,
    portion: float = 1.0,
) -> np.ndarray:
    """Assign samples to steps.

    Args:
        n: number of samples.
        batch: batch size.
        epochs: passes over the samples, each in a new random order.
        steps: number of batches, in place of epochs.
        rng: source of the random order; without it all samples come once, in their order.
        least: the last batch of a shuffled epoch is dropped if it has fewer samples.
        portion: share of the samples that come in a shuffled epoch, rounded down to at least one.

    Returns:
        A (steps, batch) matrix of sample numbers, -1 where a batch is not full.
    """
    if n == 0:
        return np.empty((0, batch), dtype=np.int64)
    if rng is None:
        return np.pad(np.arange(n), (0, -n % batch), constant_values=-1).reshape(-1, batch)
    few = max(1, int(portion * n + 1e-9))
    in_epoch = steps_in_epoch(few, batch, least)
    total = epochs * in_epoch if steps is None else steps
    epochs = -(-total // in_epoch)
    order = np.full((epochs, in_epoch * batch), -1, dtype=np.int64)
    for row in order:
        shuffled = torch.randperm(n, generator=rng).numpy()[: min(few, len(row))]
        row[: len(shuffled)] = shuffled
    return order.reshape(-1, batch)[:total]


def interleaved(orders: Sequence[np.ndarray]) -> np.ndarray:
    """Return several plans of equally many steps as one, in which the batches of a step come one after the other."""
    if len(orders) == 1:
        return orders[0]
    width = max(order.shape[1] for order in orders)
    padded = [np.pad(order, ((0, 0), (0, width - order.shape[1])), constant_values=-1) for order in orders]
    return np.stack(padded, axis=1).reshape(-1, width)


def batch_order(seed: int, round: int, name: str, purpose: str, stream: int | None) -> torch.Generator | None:
    """Return the generator of a client's random batch order in a round, or None for no shuffling."""
    if stream is None:
        return None
    return randomness.torch_generator(seed, purpose, round, name, stream)
