"""Noise on the inputs of some clients, drawn once and for all of a client's samples alike."""

import numpy as np
import torch
from torch import Tensor

from equipoise import randomness
from equipoise.errors import EquipoiseError


def with_noise(x: Tensor, shares: dict[str, np.ndarray], variances: np.ndarray, seed: int) -> Tensor:
    """x with Gaussian noise of each client's own variance on its samples; x itself where nobody gets any."""
    if not variances.any():
        return x
    if not x.is_floating_point():
        raise EquipoiseError("the partition 'quality' adds noise to inputs that are numbers; these are symbols")
    x = x.clone()
    for (name, share), variance in zip(shares.items(), variances, strict=True):
        if variance:
            rows = torch.from_numpy(share)
            noise = torch.randn(
                (len(share), *x.shape[1:]), dtype=x.dtype, generator=randomness.torch_generator(seed, "noise", name)
            )
            x[rows] += float(variance) ** 0.5 * noise
    return x
