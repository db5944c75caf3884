"""Local optimizers: update rules of gradient descent on plain tensors, and schedules of their learning rates."""

from equipoise.optimizers.local_optimizer import LocalOptimizer, Rate, adam, as_number, move, moved
from equipoise.optimizers.schedules import RateSchedule

__all__ = ["LocalOptimizer", "Rate", "RateSchedule", "adam", "as_number", "move", "moved"]
