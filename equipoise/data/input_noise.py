"""Noise on the inputs of some clients, drawn once, for all samples of a client."""

import numpy as np
import torch
from torch import Tensor

from equipoise import randomness
from equipoise.errors import EquipoiseError


def with_noise(x: Tensor, shares: dict[str, np.ndarray], variances: np.ndarray, seed: int) -> Tensor:
    """Return x with Gaussian noise on the samples of each client; x itself if all variances are zero.

    Args:
        x: inputs of all samples.
        shares: indices of each client's samples, by the client's name.
        variances: variance of each client's noise, in the order of `shares`.
        seed: the seed of the run.
    """
    if not variances.any():
        return x
    if not x.is_floating_point():
        raise EquipoiseError("the partition 'quality' adds noise and needs inputs that are numbers; these are symbols")
    x = x.clone()
    for (name, share), variance in zip(shares.items(), variances, strict=True):
        if variance:
            rows = torch.from_numpy(share)
            noise = torch.randn(
                (len(share), *x.shape[1:]), dtype=x.dtype, generator=randomness.torch_generator(seed, "noise", name)
            )
            x[rows] += float(variance) ** 0.5 * noise
    return x
