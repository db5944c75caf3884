"""An equilibrium layer in ordinary PyTorch, without a federation: classify points on concentric rings.

python examples/equilibrium.py
"""

import math

import torch
from torch import Tensor, nn

from equipoise.equilibrium import ContractiveLinear, Equilibrium, Solves, WarmStart, project


def rings(n: int) -> tuple[Tensor, Tensor]:
    """Return points on three rings and their classes; the middle ring is one class, the others are the other."""
    ring, angle = torch.randint(0, 3, (n,)), 2 * math.pi * torch.rand(n)
    x = torch.stack([angle.cos(), angle.sin()], 1) * (0.5 + ring)[:, None]
    return x + 0.1 * torch.randn(n, 2), ring % 2


class Cell(nn.Module):
    """f(z, u) = tanh(B z + u), where the absolute values in every row of B sum to at most 0.95."""

    def __init__(self, width: int):
        super().__init__()
        self.b = ContractiveLinear(width, width, kappa=0.95)

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.b(z) + u)
        return out


def main(epochs: int = 30) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help with such a small layer
    x, y = rings(1000)
    layer = Equilibrium(Cell(32), tol=1e-3, limit=50)
    model = nn.Sequential(nn.Linear(2, 32), layer, nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    warm = WarmStart(model, len(x))
    for epoch in range(epochs):
        layer.solves = Solves()
        for index in torch.randperm(len(x)).split(100):
            with warm.at(index):  # the solve of each sample starts from its last fixed point
                loss = nn.functional.cross_entropy(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            project(model)  # keep the layer a contraction, so that it has exactly one fixed point
        if epoch in (0, epochs // 2, epochs - 1):
            print(f"epoch {epoch + 1}: loss {loss:.3f}, {layer.tally.mean:.1f} iterations per sample")
    x, y = rings(1000)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"accuracy on new points: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
