"""Update rules of local training, for one vector or a stack of them."""

from typing import Any

import torch
from torch import Tensor

Rate = float | Tensor
"""A learning rate: a number, or a tensor with one per client, of shape (1,) or (cohort, 1)."""


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


def move(v: Tensor, direction: Tensor, lr: Rate) -> None:
    """Subtract `lr` times a direction from v, in place."""
    if isinstance(lr, Tensor):
        v.addcmul_(direction, lr, value=-1)
    else:
        v.add_(direction, alpha=-lr)


def moved(v: Tensor, direction: Tensor, lr: Rate) -> Tensor:
    """Return v minus `lr` times a direction, rounded as `move` rounds it."""
    return v.addcmul(direction, lr, value=-1) if isinstance(lr, Tensor) else v.add(direction, alpha=-lr)


class LocalOptimizer:
    """SGD, with or without momentum, Adam or AdamW, for vectors of shape (P,) or (cohort, P).

    Weight decay is that of torch.optim: for SGD and Adam it is added to the gradient (after clipping), for AdamW the
    parameters shrink by lr * weight_decay in every step, whatever the gradient is.
    """

    def __init__(
        self,
        rule: str,
        lr: Rate,
        momentum: float = 0.0,
        clip: float | None = None,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ):
        """Create an optimizer with an empty memory.

        Args:
            rule: "sgd", "adam" or "adamw".
            lr: learning rate.
            momentum: momentum of SGD.
            clip: largest norm of a gradient.
            nesterov: whether the momentum is Nesterov's.
            weight_decay: how strongly parameters are pulled to zero.
        """
        self.rule, self.lr, self.momentum, self.clip = rule, lr, momentum, clip
        self.nesterov, self.weight_decay = nesterov, weight_decay
        self.first: Any = 0.0
        self.second: Any = 0.0
        self.count = 0

    def __call__(self, v: Tensor, g: Tensor, mask: Tensor | None = None) -> None:
        """Move v by one step against the gradient g, in place; where `mask` is zero, v does not move."""
        if mask is not None:
            g = g * mask
        if self.clip is not None:
            g = g * (self.clip / g.norm(dim=-1, keepdim=True).clamp(min=self.clip))
        if self.weight_decay:
            decay = self.weight_decay * v if mask is None else self.weight_decay * v * mask
            if self.rule == "adamw":
                move(v, decay, self.lr)
            else:
                g = g + decay
        if self.rule != "sgd":
            self.count += 1
            self.first, self.second, g = adam(self.first, self.second, self.count, g)
        elif self.momentum:
            self.first = self.momentum * self.first + g
            g = g + self.momentum * self.first if self.nesterov else self.first
        move(v, g, self.lr)


def as_number(lr: Rate) -> float:
    """Return the rate of a single client as a number."""
    return float(lr.item()) if isinstance(lr, torch.Tensor) else lr
