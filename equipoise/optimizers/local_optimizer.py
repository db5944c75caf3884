"""Update rules of gradient descent on plain tensors."""

from typing import Any

from torch import Tensor


def adam(first: Any, second: Any, count: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do one step of Adam (Kingma and Ba, 2015, Alg. 1).

    Args:
        first: running mean of gradients.
        second: running mean of squared gradients.
        count: number of gradients, including this one.
        g: the gradient.

    Returns:
        The two new means, and the direction of the step.
    """
    first = 0.9 * first + 0.1 * g
    second = 0.999 * second + 0.001 * g.square()
    return first, second, (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)).sqrt() + 1e-8)


class LocalOptimizer:
    """SGD, with or without momentum, or Adam, for vectors of shape (P,) or (cohort, P)."""

    def __init__(self, rule: str, lr: float, momentum: float = 0.0, clip: float | None = None):
        """Create an optimizer with an empty memory.

        Args:
            rule: "sgd" or "adam".
            lr: learning rate.
            momentum: momentum of SGD.
            clip: largest norm of a gradient.
        """
        self.lr, self.clip = lr, clip
        self.adam, self.momentum = rule == "adam", momentum
        self.first: Any = 0.0
        self.second: Any = 0.0
        self.count = 0

    def __call__(self, v: Tensor, g: Tensor) -> None:
        """Move v by one step against the gradient g, in place."""
        if self.clip is not None:
            g = g * (self.clip / g.norm(dim=-1, keepdim=True).clamp(min=self.clip))
        if self.adam:
            self.count += 1
            self.first, self.second, g = adam(self.first, self.second, self.count, g)
        elif self.momentum:
            self.first = g = self.momentum * self.first + g
        v.add_(g, alpha=-self.lr)
