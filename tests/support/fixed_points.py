"""A small layer, and numbers that are the same every time, for the tests of equilibria."""

from typing import Any

import torch
from torch import Tensor, nn

EXACT: dict[str, Any] = {"tol": 1e-10, "limit": 500}


class Dense(nn.Module):
    """f(z, x) = tanh(B z + x); counts the samples that it is computed for."""

    def __init__(self, width: int = 5, scale: float = 0.5):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.b = nn.Linear(width, width, dtype=torch.float64)
            self.b.weight.data *= scale / torch.linalg.matrix_norm(self.b.weight.data, ord=2)
        self.samples = 0

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.samples += len(z)
        return torch.tanh(self.b(z) + x)


class Recorded:
    """f(z, x) = z/2 + x; keeps the guesses z that it is computed for."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, z: Tensor, x: Tensor) -> Tensor:
        self.seen.append(z.clone())
        return 0.5 * z + x


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
