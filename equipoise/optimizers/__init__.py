"""Local optimizers: update rules of gradient descent on plain tensors."""

from equipoise.optimizers.local_optimizer import LocalOptimizer, adam

__all__ = ["LocalOptimizer", "adam"]
