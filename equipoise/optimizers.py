"""Update rules of gradient descent on plain tensors."""

from typing import Any

from torch import Tensor


def adam(first: Any, second: Any, count: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Its two means after one more gradient, the count-th, and the direction to go (Kingma and Ba, 2015, Alg. 1)."""
    first = 0.9 * first + 0.1 * g
    second = 0.999 * second + 0.001 * g.square()
    return first, second, (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)).sqrt() + 1e-8)


class LocalOptimizer:
    """A step of SGD, with or without momentum, or Adam, in place, for (P,) and (cohort, P) alike."""

    def __init__(self, rule: str, lr: float, momentum: float = 0.0, clip: float | None = None):
        self.lr, self.clip = lr, clip
        self.adam, self.momentum = rule == "adam", momentum
        self.first: Any = 0.0
        self.second: Any = 0.0
        self.count = 0

    def __call__(self, v: Tensor, g: Tensor) -> None:
        if self.clip is not None:
            g = g * (self.clip / g.norm(dim=-1, keepdim=True).clamp(min=self.clip))
        if self.adam:
            self.count += 1
            self.first, self.second, g = adam(self.first, self.second, self.count, g)
        elif self.momentum:
            self.first = g = self.momentum * self.first + g
        v.add_(g, alpha=-self.lr)
